"""Concurrent layers of a network: each layer runs a chunk of time steps and its input product later than the one below.

A layer with a small batch leaves most of the GPU idle. Each layer is a launch of the forward kernel; between two
layers, a kernel computes the input product. Each launch is the programmatic dependent of the previous one: it begins
when all blocks of that one are running, waits for chunks of its results, and counts its own. So kernels wait only for
running kernels, whatever else the GPU runs. The backward runs from the last layer to the first in the same way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from flashrnn.cells import Cell
from flashrnn.cuda.ahead import meanwhile
from flashrnn.cuda.arguments import Argument
from flashrnn.cuda.launch import LoadedKernel
from flashrnn.cuda.resident import solver
from flashrnn.cuda.resident.backend import CudaFused
from flashrnn.cuda.resident.calls import Forward, producers
from flashrnn.cuda.resident.input_product import OPERATIONS, ProductTiling, compile_product, product_kernel
from flashrnn.cuda.resident.tiling import Tiling
from flashrnn.cuda.spec import ALONE, Concurrency, KernelSpec, Variant
from flashrnn.gpu import device_gpu
from flashrnn.memory_format import aligned, empty_in_format
from flashrnn.problem import Gradients, Problem, StateGradients, empty_aux, state_dtype
from flashrnn.residual import Residual

FEWEST_STEPS = 64
# Fitted to times measured on an H200 (docs/dev/log.md), in clock cycles by the solver's estimates:
_WORTH = 0.87  # maximum ratio to the estimate for layers in turn, which is up to 8 % too low
_CHUNK = 1500  # cost for a loop of waiting for a chunk and counting it
_HOP = 9500  # from the last store of a chunk to the next loop's first load of its product, without the product


def are_faster(problem: Problem, batch: int, layers: int, backend: str) -> bool:
    """Return whether long sequences are expected to take less time with concurrent layers than with layers in turn.

    `problem` is that of one layer, `backend` the requested one.
    """
    if backend not in ("auto", CudaFused.name) or problem.gpu is None or CudaFused().unsupported_reason(problem):
        return False
    sizes = problem.cell, problem.heads, problem.head_dim, batch, problem.dtype, problem.gpu
    return _product_tiling(KernelSpec("forward", *sizes), layers, steps=16 * FEWEST_STEPS) is not None


def _product_tiling(alone: KernelSpec, layers: int, steps: int) -> ProductTiling | None:
    """Return the tiling of the products between concurrent layers; None if the layers run in turn.

    They do if concurrent layers are not supported, or not expected to be faster. `alone` is the spec of one layer. GPUs
    other than Hopper were not measured.
    """
    served = alone.gpu.warpgroup_products and alone.dtype.itemsize == 2 and alone.heads * alone.head_dim % 8 == 0
    if not served or steps < FEWEST_STEPS or (tiling := ProductTiling.of(alone)) is None:
        return None
    spec = replace(alone, layers=layers, product_blocks=tiling.blocks)
    if (layers - 1) * tiling.blocks >= spec.gpu.multiprocessors or solver.infeasible(spec):
        return None
    loop = solver.likely_tiling(spec)
    if _clusters(spec, producers(spec, loop), loop.blocks) > spec.gpu.clusters_at_once(loop.blocks):
        return None
    offset = tiling.chunk + loop.stages  # steps by which a layer starts later than the previous one
    of_chunk = tiling.chunk * tiling.step_operations(spec.batch) / OPERATIONS
    expected = (steps + (layers - 1) * offset) * (solver.cycles(spec, loop) + _CHUNK / tiling.chunk)
    expected += (layers - 1) * (of_chunk + _HOP)
    in_turn = layers * steps * solver.cycles(alone, solver.likely_tiling(alone))
    return tiling if expected < _WORTH * in_turn else None


def _clusters(spec: KernelSpec, loop_blocks: int, cluster: int) -> int:
    """Return how many clusters of `cluster` blocks the layers of a spec have, including the products between them."""
    return spec.layers * loop_blocks // cluster + (spec.layers - 1) * -(-spec.product_blocks // cluster)


@dataclass(frozen=True, eq=False)
class _Chain:
    """The launches of one direction: the first layer's loop and, for each later layer, a product before its loop."""

    tiling: ProductTiling
    product: LoadedKernel
    last_product: LoadedKernel | None  # after the last loop; None if it does not fit beside the loops
    counts: int  # increments of a chunk's counter by a loop
    sizes: tuple[int, int, int]  # B, T, and rows between consecutive steps in memory

    def launch(self, loops: Sequence[Callable[..., None]], products: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Launch a chain.

        Args:
            loops: the launch function of each layer; it is given the arguments of kernels of concurrent layers.
            products: rows, W and result of each product: those between loops, and optionally one after the last loop.
        """
        chunks, device = -(-self.sizes[1] // self.tiling.chunk), products[0][0].device
        written = torch.zeros(2 * len(products), chunks, dtype=torch.int32, device=device)
        of_loops, of_products = [*written[::2], None], [*written[1::2], None]
        producers, arrived = -(-self.tiling.blocks // self.product.blocks) * self.product.blocks, None
        for k, loop in enumerate(loops):
            loop(arrived=arrived, producers=producers, done=of_loops[k])
            if k < len(loops) - 1:
                arrived = of_products[k]
                self._multiply(self.product, *products[k], of_loops[k], arrived)
        if len(products) == len(loops):
            self._multiply(self.last_product, *products[-1], of_loops[len(loops) - 1], None)

    def _multiply(
        self, kernel: LoadedKernel, rows: Tensor, W: Tensor, product: Tensor, arrived: Tensor, done: Tensor | None
    ) -> None:
        """Launch the kernel of a product.

        It waits for the counters `arrived` of the chunks of its rows, and increments those in `done`.
        """
        B, T, row_t = self.sizes
        arguments: Mapping[str, Argument] = {
            "rows": rows,
            "W": W,
            "product": product,
            "arrived": arrived,
            "producers": self.counts,
            "done": done,
            "B": B,
            "T": T,
            "row_t": row_t,
        }
        kernel.launch(-(-self.tiling.blocks // kernel.blocks), arguments)


class Results(NamedTuple):
    """What the forward pass of a layer writes; aux and gates are None if no backward pass follows."""

    h: Tensor  # in the memory format of x
    aux: Tensor | None
    last: Tensor  # [S, 1, B, H]
    gates: Tensor | None


class OverlappedLayers:
    """Calls of concurrent layers whose inputs differ only in their values."""

    def __init__(
        self,
        taken: CudaFused,
        cell: Cell,
        forwards: list[Forward],
        chain: _Chain,
        back: "tuple[_Chain, Concurrency] | None",
    ) -> None:
        self._taken, self._cell, self._forwards, self._chain, self._back = taken, cell, forwards, chain, back

    def __call__(
        self, x: Tensor, weights: Sequence[tuple], initial: Sequence[Tensor | int | None], training: bool
    ) -> list[Results]:
        """Return the results of each layer.

        Args:
            x: the input, dense.
            weights: W, R and b (or None) of each layer.
            initial: the initial states of each layer, as `Forward.launch` takes them.
            training: whether a backward pass follows.
        """
        first, width, H = self._forwards[0], self._chain.tiling.width, self._chain.tiling.K
        matrices = [_matrix(W) for W, _, _ in weights]
        results = []
        for _ in weights:
            aux, gates = first.empty_residual(x) if training else (None, None)
            last = x.new_empty((first.states, 1, first.batch, H), dtype=state_dtype(x.dtype))
            results.append(Results(x.new_empty((*x.shape[:-1], H)), aux, last, gates))
        inputs = [linear(x, matrices[0]), *(x.new_empty((*x.shape[:-1], width)) for _ in weights[1:])]

        def loop(k: int) -> Callable[..., None]:
            (_, R, b), forward, states = weights[k], self._forwards[min(k, 1)], initial[k]
            return lambda **chunks: forward.launch(inputs[k], R, b, states, None, *results[k], **chunks)

        products = list(zip((one.h for one in results), matrices[1:], inputs[1:], strict=False))
        self._chain.launch([loop(k) for k in range(len(weights))], products)
        return results

    def backward(
        self,
        d_h: Tensor | None,
        calls: Sequence[tuple[Residual, StateGradients]],
        matrices: Sequence[Tensor],
        x: Tensor | None,
    ) -> tuple[list[Gradients], Tensor | None] | None:
        """Return the gradients of each layer's recurrence, and that of x; None if the layers must run in turn.

        Args:
            d_h: the gradient of the last layer's h [B, T, N, D], or None.
            calls: of each layer; their gradients have no h.
            matrices: W of each layer.
            x: the input, if its gradient is needed. That is None if it is not computed here.
        """
        if self._back is None:
            return None
        chain, concurrency = self._back
        backwards = []
        for k, (residual, grads) in reversed(list(enumerate(calls))):
            top = k == len(calls) - 1
            d = d_h if top else empty_in_format(residual.h, *residual.h.shape[2:])
            of_layer = concurrency._replace(dependent=not top)
            backwards.append(self._taken.backward_of(self._cell, residual, grads._replace(h=d), of_layer))
        products = [
            (upper.d_Wx, _matrix(W), lower.d_h)
            for upper, lower, W in zip(backwards, backwards[1:], reversed(matrices), strict=False)
        ]
        of_x = None
        if x is not None and chain.last_product and x.shape[-1] == chain.tiling.width:
            of_x = x.new_empty(x.shape)  # dense, even if x is not
            products.append((backwards[-1].d_Wx, _matrix(matrices[0]), of_x))
        chain.launch([backward.launch for backward in backwards], products)
        return [backward.gradients() for backward in reversed(backwards)], of_x


def _matrix(W: Tensor) -> Tensor:
    return aligned(W.contiguous())


def overlapped_layers(
    taken: CudaFused,
    cell: Cell,
    layers: int,
    heads: int,
    head_dim: int,
    sizes: tuple[int, int, bool],
    dtype: torch.dtype,
    device: torch.device,
    half_bias: bool,
    training: bool,
) -> OverlappedLayers | None:
    """Return concurrent layers; None if these are not supported, or not expected to be faster than layers in turn.

    `sizes`: batch, steps, and whether tensors are time-major.
    """
    B, T, time_major = sizes
    alone = KernelSpec("forward", cell, heads, head_dim, B, dtype, device_gpu(device.index), Variant(training=training))
    tiling = _product_tiling(alone, layers, T)
    if tiling is None:
        return None
    rows, gates = (T, B) if time_major else (B, T), (len(cell.input_gates), heads, head_dim)
    Wx = torch.empty(*rows, *gates, dtype=dtype, device="meta")
    Wx = Wx.transpose(0, 1) if time_major else Wx
    in_memory = B, T, B if time_major else 1

    def forward(dependent: bool) -> Forward:
        concurrency = Concurrency(layers, tiling.blocks, dependent)
        return taken.forward_of(cell, Wx, device, False, half_bias, training=training, concurrency=concurrency)

    back = None
    with meanwhile(partial(forward, False), partial(compile_product, alone, tiling)):
        if training:
            back = _backward_chain(taken, replace(alone, direction="backward"), layers, Wx, in_memory, device)
    forwards = [forward(False), forward(True)]
    chain = _chain(alone, layers, tiling, forwards[1].tiling, in_memory, device)
    return chain and OverlappedLayers(taken, cell, forwards, chain, back)


def _backward_chain(
    taken: CudaFused,
    alone: KernelSpec,
    layers: int,
    Wx: Tensor,
    in_memory: tuple[int, int, int],
    device: torch.device,
) -> tuple[_Chain, Concurrency] | None:
    """Return the launches of the backward pass, and what each of its loops runs with; None to run layers in turn."""
    tiling = _product_tiling(alone, layers, in_memory[1])
    h, aux = empty_in_format(Wx, alone.heads, alone.head_dim), empty_aux(alone.cell, Wx, False, True)
    if tiling is None:
        taken.prepare_backward(alone.cell, h, aux, device, ALONE)
        return None
    concurrency = Concurrency(layers, tiling.blocks)
    with meanwhile(partial(compile_product, alone, tiling)):
        loop = taken.prepare_backward(alone.cell, h, aux, device, concurrency)
    chain = _chain(alone, layers, tiling, loop, in_memory, device)
    return chain and (chain, concurrency)


def _chain(
    alone: KernelSpec,
    layers: int,
    tiling: ProductTiling,
    loop: Tiling,
    sizes: tuple[int, int, int],
    device: torch.device,
) -> _Chain | None:
    """Return the launches of loops with this tiling; None if they cannot run concurrently."""
    product = product_kernel(alone, tiling, loop.blocks, device.index)
    spec = replace(alone, layers=layers, product_blocks=tiling.blocks)
    blocks = producers(spec, loop)
    if _clusters(spec, blocks, loop.blocks) > min(spec.gpu.clusters_at_once(loop.blocks), product.at_once):
        return None
    idle = spec.gpu.multiprocessors - layers * blocks - (layers - 1) * -(-tiling.blocks // loop.blocks) * loop.blocks
    last = product_kernel(alone, tiling, 1, device.index) if tiling.backward and tiling.blocks <= idle else None
    counts = blocks if tiling.backward else blocks * loop.unit_tiles  # as for_each_chunk counts
    return _Chain(tiling, product, last, counts, sizes)
