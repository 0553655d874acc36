"""What a backend is asked to do, and what it gives back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from flashrnn.cells import Cell
from flashrnn.gpu import Gpu, nvidia_gpu
from flashrnn.memory_format import is_time_major
from flashrnn.residual import GateFormat, Residual, residual_dtype

PLAIN = (Tensor, nn.Parameter)
"""The classes of tensors that nobody but autograd looks at."""


class Problem(NamedTuple):
    """Everything that decides whether, and how well, a backend serves a call."""

    cell: Cell
    heads: int
    head_dim: int
    dtype: torch.dtype  # of Wx, R and h
    device: torch.device
    training: bool  # there is a residual for a backward pass
    reset: bool  # states return to zero at document boundaries
    assumed_gpu: Gpu | None = None  # asked about in place of the one that `device` is
    tf32: bool = False  # see `tf32_allowed`

    @property
    def gpu(self) -> Gpu | None:
        """Return the NVIDIA GPU that serves the call; None if it is another device."""
        return self.assumed_gpu or nvidia_gpu(self.device)

    @property
    def directions(self) -> tuple[str, ...]:
        """Return the directions whose kernels the call needs."""
        return ("forward", "backward") if self.training else ("forward",)

    def gpu_reason(self) -> str | None:
        """Return why no backend serves the call's NVIDIA GPU; None if some do, or if the call has no such GPU."""
        if self.gpu is None or self.gpu.capability >= (8, 0):
            return None
        return f"it needs compute capability 8.0, {self.gpu.name} has {'.'.join(map(str, self.gpu.capability))}"

    def dtype_reason(self, allowed: tuple[torch.dtype, ...]) -> str | None:
        """Return why a backend that computes in the `allowed` dtypes does not serve the call; None if it does."""
        if self.dtype in allowed:
            return None
        *others, last = map(dtype_name, allowed)
        return f"it computes in {', '.join(others)} and {last}, not in {self.dtype}"


class Inputs(NamedTuple):
    """What a backend computes from, checked; shapes of `flashrnn.flashrnn`."""

    Wx: Tensor  # [B, T, Gi, N, D], maybe with batch and time swapped in memory
    R: Tensor  # [Gr, N, D, D], dtype of Wx
    b: Tensor  # [G, N, D], dtype of Wx or state dtype
    states: Tensor | None  # [S, B, N, D], state dtype, as the caller gave them: see `initial_states`; None: zeros
    reset: Tensor | None  # [B, T] bool


class States(NamedTuple):
    """Results of the recurrence."""

    h: Tensor  # [B, T, N, D], dtype of Wx: the first state after every step
    aux: Tensor  # [S-1, B, T, N, D]: the others, see `empty_aux`
    last: Tensor  # [S, B, N, D], state dtype: all states after the last step


class StateGradients(NamedTuple):
    """Gradients of `States`; None where nobody asked for one."""

    h: Tensor | None
    aux: tuple[Tensor | None, ...]  # S-1 times [B, T, N, D], in any memory format
    last: Tensor | None

    @property
    def of_aux(self) -> bool:
        """Return whether there is a gradient of a state after the first."""
        return any(d is not None for d in self.aux)


class Gradients(NamedTuple):
    """Results of the backward pass, in the shapes and dtypes of the inputs; that of b may be in state dtype."""

    Wx: Tensor
    R: Tensor
    b: Tensor
    states: Tensor


class KernelUnavailable(RuntimeError):
    """A backend serves the problem, but its kernels cannot be compiled on this machine, or do not fit on its GPU."""


@contextmanager
def making_kernels(failure: str) -> Iterator[None]:
    """Raise KernelUnavailable, which says `failure` and why, for any error but that there is no memory left."""
    try:
        yield
    except (KernelUnavailable, torch.OutOfMemoryError):
        raise
    except Exception as error:  # compilers and drivers have many
        raise KernelUnavailable(f"{failure}: {error}") from error


class Backend(Protocol):
    """One way to run the recurrence."""

    name: str

    def gate_format(self, cell: Cell, head_dim: int, dtype: torch.dtype) -> GateFormat:
        """Return the format in which `forward` writes gates, and in which `backward` need not convert them."""

    def unsupported_reason(self, problem: Problem) -> str | None:
        """Return why this backend does not serve the problem; None if it does."""

    def forward(self, cell: Cell, inputs: Inputs, all_states: bool, training: bool) -> tuple[States, Tensor]:
        """Return the states, and the gates for the residual, as `empty_aux` and `empty_gates` make them.

        Raises KernelUnavailable before it computes anything. With `training` it also looks for what `backward` needs,
        as far as that may be missing where the forward has all: a backward does not take another backend.
        """

    def backward(self, cell: Cell, residual: Residual, grads: StateGradients) -> Gradients:
        """Return the gradients of the inputs."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as people write it: bfloat16."""
    return str(dtype).removeprefix("torch.")


def tf32_allowed(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether products of `dtype` may be as coarse as TF32: PyTorch's setting for its own products, now.

    `torch.backends.cuda.matmul.fp32_precision` shows what any of PyTorch's ways to set it has set; `allow_tf32` raises
    where the older and the newer ones are mixed.
    """
    if dtype != torch.float32 or device.type != "cuda":
        return False
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of biases, of states across time and of sums: float32 for half types, otherwise `dtype`."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def aux_gradient(grads: StateGradients, aux: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the gradients of aux as one tensor in `dtype`, in memory as aux; None if there are none."""
    if not grads.of_aux:
        return None
    stacked = torch.empty_like(aux, dtype=dtype)
    for out, d in zip(stacked, grads.aux, strict=True):
        out.zero_() if d is None else out.copy_(d)
    return stacked


def initial_states(cell: Cell, states: Tensor | None, rows: Tensor) -> Tensor:
    """Return the states [S, B, N, D] before the first of `rows` [B, T, ..., N, D], contiguous: zeros for None, and h
    rounded to the dtype of `rows`, which it has at every step."""
    if states is None:
        return empty_states(cell, rows).zero_()
    if states.dtype == rows.dtype:
        return states.contiguous()
    rounded = states.clone(memory_format=torch.contiguous_format)
    rounded[0] = states[0].to(rows.dtype)
    return rounded


def aux_dtype(cell: Cell, dtype: torch.dtype, all_states: bool) -> torch.dtype:
    """Return the dtype of the states after the first, of every step.

    It is the state dtype, but `residual_dtype` where the cell allows it and they are not among the results.
    """
    return residual_dtype(dtype) if cell.float16_states and not all_states else state_dtype(dtype)


def empty_states(cell: Cell, rows: Tensor) -> Tensor:
    """Return an empty tensor [S, B, N, D] for the states before or after all steps of `rows` [B, T, ..., N, D]."""
    B, _, *_, N, D = rows.shape
    return rows.new_empty(len(cell.states), B, N, D, dtype=state_dtype(rows.dtype))


def empty_aux(cell: Cell, Wx: Tensor, all_states: bool, training: bool) -> Tensor:
    """Return an empty tensor [S-1, B, T, N, D] for the states after the first; T = 0 if nobody needs them."""
    B, T, _, N, D = Wx.shape
    dtype = aux_dtype(cell, Wx.dtype, all_states)
    shape = (len(cell.states) - 1, T if all_states or training else 0)
    if is_time_major(Wx):
        return Wx.new_empty(*shape, B, N, D, dtype=dtype).transpose(1, 2)
    return Wx.new_empty(shape[0], B, shape[1], N, D, dtype=dtype)
