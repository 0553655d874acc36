"""The interface of a backend: problems, inputs and results."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from flashrnn._torch_private import precision_of_products
from flashrnn.cells import Cell
from flashrnn.cells.trace import reduces_states
from flashrnn.gpu import Gpu, nvidia_gpu
from flashrnn.memory_format import is_time_major
from flashrnn.residual import GateFormat, Residual, residual_dtype

PLAIN = (Tensor, nn.Parameter)
"""The classes of tensors without behaviour of their own: a subclass may override operators."""


def on_gpu(x: Tensor) -> bool:
    """Return whether x is a tensor of a PLAIN class on a GPU."""
    return type(x) in PLAIN and x.is_cuda


class Problem(NamedTuple):
    """Everything that decides whether a backend supports a call, and how fast it is."""

    cell: Cell
    heads: int
    head_dim: int
    dtype: torch.dtype  # of Wx, R and h
    device: torch.device
    training: bool  # a backward pass follows
    reset: bool  # states return to zero at document boundaries
    assumed_gpu: Gpu | None = None  # the GPU to plan for, instead of the one of `device`
    tf32: bool = False  # see `tf32_allowed`

    @property
    def gpu(self) -> Gpu | None:
        """Return the NVIDIA GPU that runs the call; None on another device."""
        return self.assumed_gpu or nvidia_gpu(self.device)

    @property
    def directions(self) -> tuple[str, ...]:
        """Return the directions whose kernels the call needs."""
        return ("forward", "backward") if self.training else ("forward",)

    def gpu_reason(self) -> str | None:
        """Return why no backend supports the NVIDIA GPU of the call; None if one does, or if there is no such GPU."""
        if self.gpu is None or self.gpu.capability >= (8, 0):
            return None
        return f"it needs compute capability 8.0, {self.gpu.name} has {'.'.join(map(str, self.gpu.capability))}"

    def dtype_reason(self, allowed: tuple[torch.dtype, ...]) -> str | None:
        """Return why a backend for the `allowed` dtypes does not support the call; None if it does."""
        if self.dtype in allowed:
            return None
        *others, last = map(dtype_name, allowed)
        return f"it computes in {', '.join(others)} and {last}, not in {self.dtype}"


class Inputs(NamedTuple):
    """The checked inputs of a backend, with the shapes of `flashrnn.flashrnn`."""

    Wx: Tensor  # [B, T, Gi, N, D], batch-major or time-major in memory
    R: Tensor  # [Gr, N, D, D], dtype of Wx
    b: Tensor  # [G, N, D], dtype of Wx or state dtype
    states: Tensor | None  # [S, B, N, D], state dtype, from the caller: see `initial_states`; None: zeros
    reset: Tensor | None  # [B, T] bool


class States(NamedTuple):
    """Results of the recurrence."""

    h: Tensor  # [B, T, N, D], dtype of Wx: the first state after every step
    aux: Tensor  # [S-1, B, T, N, D]: the other states, see `empty_aux`
    last: Tensor  # [S, B, N, D], state dtype: all states after the last step


class StateGradients(NamedTuple):
    """Gradients of `States`; None for states without a gradient."""

    h: Tensor | None
    aux: tuple[Tensor | None, ...]  # S-1 times [B, T, N, D], in any memory format
    last: Tensor | None

    @property
    def of_aux(self) -> bool:
        """Return whether a state other than the first has a gradient."""
        return any(d is not None for d in self.aux)


class Gradients(NamedTuple):
    """Results of the backward pass, with the shapes and dtypes of the inputs; b's may be in state dtype."""

    Wx: Tensor
    R: Tensor
    b: Tensor
    states: Tensor


class KernelUnavailable(RuntimeError):
    """Error: a backend supports the problem, but its kernels cannot be compiled here or do not fit on the GPU."""


@contextmanager
def making_kernels(failure: str) -> Iterator[None]:
    """A context that turns errors, except OutOfMemoryError, into KernelUnavailable; `failure` begins the message."""
    try:
        yield
    except (KernelUnavailable, torch.OutOfMemoryError):
        raise
    except Exception as error:  # compilers and drivers raise many kinds
        raise KernelUnavailable(f"{failure}: {error}") from error


class Backend(Protocol):
    """An implementation of the recurrence."""

    name: str

    def gate_format(self, cell: Cell, heads: int, head_dim: int, dtype: torch.dtype) -> GateFormat:
        """Return the format in which `forward` writes gates and `backward` reads them without conversion."""

    def unsupported_reason(self, problem: Problem) -> str | None:
        """Return why this backend does not support the problem; None if it does."""

    def forward(self, cell: Cell, inputs: Inputs, all_states: bool, training: bool) -> tuple[States, Tensor]:
        """Return the states, and the gates for the residual, in the formats of `empty_aux` and `empty_gates`.

        Raises KernelUnavailable before anything is computed. With `training`, this includes kernels that only
        `backward` needs, because a backward pass cannot switch to another backend.
        """

    def backward(self, cell: Cell, residual: Residual, grads: StateGradients) -> Gradients:
        """Return the gradients of the inputs."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module: bfloat16."""
    return str(dtype).removeprefix("torch.")


def tf32_allowed(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether PyTorch's setting for matrix products allows TF32 for `dtype` on `device`.

    `torch.backends.cuda.matmul.fp32_precision` reflects all ways to set it, whereas `allow_tf32` raises an error if a
    program mixes the older and the newer settings.
    """
    if dtype != torch.float32 or device.type != "cuda":
        return False
    return precision_of_products() == "tf32"


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of biases, of states across time and of sums: float32 for half types, otherwise `dtype`."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def aux_gradient(grads: StateGradients, aux: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the gradients of aux as one tensor in `dtype`, with the strides of aux; None if there are none."""
    if not grads.of_aux:
        return None
    stacked = torch.empty_like(aux, dtype=dtype)
    for out, d in zip(stacked, grads.aux, strict=True):
        out.zero_() if d is None else out.copy_(d)
    return stacked


def initial_states(cell: Cell, states: Tensor | None, rows: Tensor) -> Tensor:
    """Return the states [S, B, N, D] before the first step of `rows` [B, T, ..., N, D], contiguous.

    They are zeros if `states` is None. h is rounded to the dtype of `rows`, as it is after every step.
    """
    if states is None:
        return empty_states(cell, rows).zero_()
    if states.dtype == rows.dtype:
        return states.contiguous()
    rounded = states.clone(memory_format=torch.contiguous_format)
    rounded[0] = states[0].to(rows.dtype)
    return rounded


def aux_dtype(cell: Cell, dtype: torch.dtype, all_states: bool) -> torch.dtype:
    """Return the dtype in which states other than h are stored after every step.

    It is the state dtype, or `residual_dtype` if the cell allows it, the states are not among the results, and no
    reduction over units depends on them. A norm subtracts their mean, after which rounding errors could dominate.
    """
    half = cell.float16_states and not all_states and not reduces_states(cell)
    return residual_dtype(dtype) if half else state_dtype(dtype)


def empty_states(cell: Cell, rows: Tensor) -> Tensor:
    """Return an empty tensor [S, B, N, D] for the states before or after all steps of `rows` [B, T, ..., N, D]."""
    B, _, *_, N, D = rows.shape
    return rows.new_empty(len(cell.states), B, N, D, dtype=state_dtype(rows.dtype))


def empty_aux(cell: Cell, Wx: Tensor, all_states: bool, training: bool) -> Tensor:
    """Return an empty tensor [S-1, B, T, N, D] for the states other than h, with T = 0 if they are not needed."""
    B, T, _, N, D = Wx.shape
    dtype = aux_dtype(cell, Wx.dtype, all_states)
    shape = (len(cell.states) - 1, T if all_states or training else 0)
    if is_time_major(Wx):
        return Wx.new_empty(*shape, B, N, D, dtype=dtype).transpose(1, 2)
    return Wx.new_empty(shape[0], B, shape[1], N, D, dtype=dtype)
