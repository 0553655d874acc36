"""Decoding with a language model of residual recurrent blocks on an NVIDIA GPU, with one kernel launch per token.

At small batch sizes, the time of a step is limited by reading the weights once. A kernel per layer would wait for the
previous layer without reading anything. One kernel for all layers reads the weights of the next layer meanwhile.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flashrnn._torch_private import copy_each as copy_each
from flashrnn._torch_private import free_cublas_workspaces as free_cublas_workspaces
from flashrnn.cells import Cell
from flashrnn.cuda.ahead import start_in_background
from flashrnn.cuda.available import unavailable
from flashrnn.cuda.decoding.add_norm import WARPS, compile_add_norm, load_add_norm
from flashrnn.cuda.decoding.choose import MOST_CLASSES, load_choose
from flashrnn.cuda.decoding.step import compile_step, exchanged, load_step
from flashrnn.cuda.decoding.tiling import ModelSpec, unsupported_norms, unsupported_sizes
from flashrnn.cuda.parameters import Parameter
from flashrnn.cuda.spec import KernelSpec
from flashrnn.gpu import device_gpu
from flashrnn.problem import Problem

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class ResidualBlock(NamedTuple):
    """The weights of a block and its states. Weights are contiguous and of one dtype.

    With scales (float32), `gates`, `up` and `down` are int8, and each of their rows is multiplied by its scale. Layer
    norms have no biases and eps 1e-5. The block computes

    x = x + head_norm * norm(recurrence(gates @ (mixer_norm * norm(x))))  # the outer norm is one per head
    x = x + down @ gelu(up @ (mlp_norm * norm(x)))
    """

    mixer_norm: Tensor  # [N D]
    gates: Tensor  # [Gi N D, N D]
    R: Tensor  # [Gr, N, D, D]
    b: Tensor  # [G, N, D]
    head_norm: Tensor  # [N D]
    mlp_norm: Tensor  # [N D]
    up: Tensor  # [H, N D]
    down: Tensor  # [N D, H]
    states: Tensor  # float32 [S, B, N, D]
    gates_scale: Tensor | None = None  # [Gi N D]
    up_scale: Tensor | None = None  # [H]
    down_scale: Tensor | None = None  # [N D]


class ResidualModel(NamedTuple):
    """A language model: the logits are head @ (norm * layer_norm(blocks(embedding[token])))."""

    cell: Cell
    embedding: Tensor  # [V, N D]
    blocks: Sequence[ResidualBlock]
    norm: Tensor  # [N D]
    head: Tensor  # [C, N D]
    head_scale: Tensor | None = None  # [C]

    @property
    def spec(self) -> ModelSpec:
        block = self.blocks[0]
        _, B, N, D = block.states.shape
        device = self.embedding.device
        kernel = KernelSpec("forward", self.cell, N, D, B, self.embedding.dtype, device_gpu(device.index))
        return ModelSpec(kernel, len(self.blocks), len(block.up), len(self.head), self.head_scale is not None)


def unsupported_reason(model: ResidualModel) -> str | None:
    """Return why ModelStep does not support the model; None if it does."""
    device, dtype = model.embedding.device, model.embedding.dtype
    _, _, N, D = model.blocks[0].states.shape
    problem = Problem(model.cell, N, D, dtype, device, training=False, reset=False)
    if reason := unavailable(problem, _DTYPES):
        return reason
    int8 = model.head_scale is not None
    matrix = torch.int8 if int8 else dtype
    wanted = [(dtype, model.embedding), (dtype, model.norm), (matrix, model.head)]
    for block in model.blocks:
        wanted += [(matrix, one) for one in (block.gates, block.up, block.down)]
        wanted += [(dtype, one) for one in (block.mixer_norm, block.R, block.b, block.head_norm, block.mlp_norm)]
        wanted += [(torch.float32, one) for one in (block.states, *(block[-3:] if int8 else ()))]
    if int8:
        wanted.append((torch.float32, model.head_scale))
    if any(one.dtype != its for its, one in wanted):
        return "its weights are of several dtypes, or its states are not float32"
    if any(not one.is_contiguous() or one.data_ptr() % 16 or one.device != device for _, one in wanted):
        return "its weights and states are not contiguous tensors of one device"
    return unsupported_sizes(model.spec)


def compile_ahead(model: ResidualModel) -> None:
    """Start compiling the kernels of `ModelStep` and `add_norm` in other processes, and return at once.

    The model must be one for which `unsupported_reason` returns None. A later call that needs the kernels waits for
    them.
    """
    spec = model.spec
    kernel = spec.kernel
    norms = partial(compile_add_norm, kernel.heads, kernel.head_dim, kernel.dtype, kernel.gpu.arch)
    start_in_background(norms, partial(compile_step, spec))


class ModelStep:
    """A function that runs one step of a model for all sequences of its states.

    Args:
        model: a model for which `unsupported_reason` returns None. Its weights may change in place.
    """

    def __init__(self, model: ResidualModel) -> None:
        self._model, spec = model, model.spec
        device, B = model.embedding.device, spec.kernel.batch
        self._launch, self._blocks = load_step(spec, device.index)
        base = model.embedding
        offsets = [
            [0 if part is None else part.data_ptr() - base.data_ptr() for part in block] for block in model.blocks
        ]

        def buffer(parameter: Parameter) -> Tensor:
            shape = [B if size == "B" else size for size in parameter.shape]
            return torch.zeros(shape, dtype=parameter.dtype, device=device)

        self._fixed = {one.name: buffer(one) for one in exchanged(spec)} | {
            "base": base.view(torch.uint8),
            "table": torch.tensor(offsets, device=device),
            "embedding": base,
            "norm": model.norm,
            "head": model.head,
            "head_scale": model.head_scale,
            "best": torch.zeros(B, dtype=torch.int64, device=device),
            "counters": torch.zeros(3, dtype=torch.int32, device=device),
            "B": B,
        }

    def __call__(
        self,
        tokens: Tensor,
        logits: Tensor | None = None,
        chosen: Tensor | None = None,
        history: Tensor | None = None,
        cursor: Tensor | None = None,
        keys: Tensor | None = None,
        temperature: Tensor | None = None,
    ) -> None:
        """Read one token of each sequence, and update the states in place.

        Args:
            tokens: int64 [B].
            logits: [B, C], in the dtype of the weights; receives the logits. Optional.
            chosen: int64 [B], may be `tokens`; receives the index of the largest logit, the smallest index if several
                are equal. With `keys`, it receives an index drawn with the probabilities softmax(logits / temperature).
                Optional.
            history: int64 [H, B]; receives the chosen tokens in its row `cursor`. Optional.
            cursor: int64 [1], incremented by one; required with `history`.
            keys: int32 [B], the random keys of the draw, which are advanced to those of the next draw. Optional.
            temperature: float32 [1], positive; required with `keys`.
        """
        results = {"logits": logits, "chosen": chosen, "history": history, "cursor": cursor}
        results |= {"keys": keys, "temperature": temperature}
        self._launch(self._blocks, self._fixed | {"tokens": tokens} | results)


def unsupported_choice(logits: Tensor) -> str | None:
    """Return why `choose` does not support logits [B, C]; None if it does."""
    if logits.device.type != "cuda" or torch.version.hip:
        return f"it runs on NVIDIA GPUs, not on {logits.device.type}"
    if not device_gpu(logits.device.index).clusters:
        return f"{device_gpu(logits.device.index).name} has no clusters of blocks"
    if logits.dtype not in _DTYPES or logits.stride(1) != 1:
        return "logits are not rows of bfloat16, float16 or float32"
    return None if logits.shape[1] <= MOST_CLASSES else f"more than {MOST_CLASSES} classes"


def choose(
    logits: Tensor,
    chosen: Tensor,
    counter: Tensor,
    settings: Tensor,
    top_k: int = 0,
    keys: Tensor | None = None,
    seen: Tensor | None = None,
    history: Tensor | None = None,
    cursor: Tensor | None = None,
) -> None:
    """Choose a class for each row of logits: the likeliest one or, with `keys`, a random one.

    Args:
        logits: [B, C], for which `unsupported_choice` returns None.
        chosen: int64 [B]; receives the classes.
        counter: int32 [1], workspace that is zero before and after the call.
        settings: float32 [4]: the temperature; top_p, the total probability of the likeliest classes to draw from; the
            logarithm of min_p, the smallest probability of a class relative to that of the likeliest; and the
            repetition penalty, by which logits of seen classes are divided, or multiplied if they are negative.
        top_k: draw only from the `top_k` likeliest classes and those with the same logit as the last of them; 0 means
            from all.
        keys: int32 [B], the random keys of the draw, which are advanced to those of the next draw. Optional.
        seen: bool [B, C], the classes to penalize, to which the chosen ones are added. Optional.
        history: int64 [H, B]; receives the classes in its row `cursor`. Optional.
        cursor: int64 [1], incremented by one; required with `history`.
    """
    B, C = logits.shape
    arguments = {"logits": logits, "stride": logits.stride(0), "C": C, "seen": seen, "keys": keys, "settings": settings}
    results = {"chosen": chosen, "history": history, "cursor": cursor, "counter": counter}
    launch = load_choose(C, logits.dtype, logits.device.index)
    launch(B, arguments | {"top_k": top_k if top_k < C else 0} | results)


def unsupported_add_norm(x: Tensor, head_dim: int) -> str | None:
    """Return why `add_norm` does not support the tensor x [..., N head_dim]; None if it does."""
    if x.device.type != "cuda" or torch.version.hip:
        return f"it runs on NVIDIA GPUs, not on {x.device.type}"
    if x.dtype not in _DTYPES:
        return f"it does not compute in {x.dtype}"
    return unsupported_norms(x.shape[-1], head_dim)


def add_norm(x: Tensor, update: Tensor, weight: Tensor, head_weight: Tensor | None, head_dim: int) -> Tensor:
    """Add an update to x in place, and return `weight` times the layer norm of x, with eps 1e-5 and without gradients.

    Args:
        x: [..., N D], contiguous, for which `unsupported_add_norm` returns None.
        update: [..., N D], contiguous and of the same dtype.
        weight: [N D], the weight of the norm.
        head_weight: [N D]; if given, `head_weight` times the layer norm of each head of `update` is added instead.
        head_dim: D.

    Returns:
        [..., N D], the normalised x.
    """
    width = x.shape[-1]
    launch = load_add_norm(width // head_dim, head_dim, x.dtype, x.device.index)
    M, normed = x.numel() // width, torch.empty_like(x)
    arguments = {"x": x, "update": update, "head_weight": head_weight, "weight": weight, "normalized": normed, "M": M}
    launch(-(-M // WARPS), arguments)
    return normed
