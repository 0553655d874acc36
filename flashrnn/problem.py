"""What a backend is asked to do, and what it gives back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flashrnn.cells import Cell
from flashrnn.gpu import Gpu, nvidia_gpu


class Problem(NamedTuple):
    """Everything that decides whether, and how well, a backend serves a call."""

    cell: Cell
    heads: int
    head_dim: int
    dtype: torch.dtype  # of Wx, R and h
    device: torch.device
    training: bool  # states are kept for a backward pass
    reset: bool  # states return to zero at document boundaries
    assumed_gpu: Gpu | None = None  # asked about in place of the one that `device` is
    tf32: bool = False  # see `tf32_allowed`

    @property
    def gpu(self) -> Gpu | None:
        """The NVIDIA GPU that serves the call; None if it is something else."""
        return self.assumed_gpu or nvidia_gpu(self.device)

    @property
    def directions(self) -> tuple[str, ...]:
        """The kernels that the call needs."""
        return ("forward", "backward") if self.training else ("forward",)

    def gpu_reason(self) -> str | None:
        """Why the call's NVIDIA GPU serves no backend; None if it does, or if the call has none."""
        if self.gpu is None or self.gpu.capability >= (8, 0):
            return None
        return f"it needs compute capability 8.0, {self.gpu.name} has {'.'.join(map(str, self.gpu.capability))}"

    def dtype_reason(self, allowed: tuple[torch.dtype, ...]) -> str | None:
        """Why a backend that computes in the `allowed` dtypes does not serve the call; None if it does."""
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
    aux: tuple[Tensor | None, ...]  # S-1 times [B, T, N, D], in any layout
    last: Tensor | None

    @property
    def of_aux(self) -> bool:
        """Whether there is a gradient of a state after the first."""
        return any(d is not None for d in self.aux)


class Kept(NamedTuple):
    """What the backward pass computes from."""

    R: Tensor
    states: Tensor | None  # the initial ones, as the forward had them
    reset: Tensor | None
    h: Tensor  # of all steps, as aux and gates in memory as Wx
    aux: Tensor
    # [B, T, G, N, D], `kept_dtype`: their pre-activations. Only the backend knows the order in a row; backends between
    # which PyTorch's setting for TF32 decides have the same, because it may change before the backward.
    gates: Tensor
    donated: bool = False  # nobody reads gates after this backward pass, which may overwrite them
    b_dtype: torch.dtype | None = None  # that the gradient of b should have; None: state dtype


class Gradients(NamedTuple):
    """Results of the backward pass, in the shapes and dtypes of the inputs; that of b may be in state dtype."""

    Wx: Tensor
    R: Tensor
    b: Tensor
    states: Tensor


class KernelUnavailable(RuntimeError):
    """A backend serves the problem, but its kernels cannot be made on this machine, or find no room on its GPU."""


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

    def supports(self, problem: Problem) -> str | None:
        """None if this backend serves the problem, otherwise the reason why not."""

    def forward(self, cell: Cell, inputs: Inputs, all_states: bool, training: bool) -> tuple[States, Tensor]:
        """The states, and the gates for `backward`: `empty_aux` and `empty_gates` say what of them is wanted.

        Raises KernelUnavailable before it computes anything. With `training` it looks for what `backward` needs, too,
        as far as that may be missing where the forward has all: no other backend reads what this one keeps.
        """

    def backward(self, cell: Cell, kept: Kept, grads: StateGradients) -> Gradients:
        """`kept` is of a `forward` with `training`."""


def dtype_name(dtype: torch.dtype) -> str:
    """As people write it: bfloat16."""
    return str(dtype).removeprefix("torch.")


def tf32_allowed(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of `dtype` may be as coarse as TF32: PyTorch's setting for its own, at the time of the call.

    `torch.backends.cuda.matmul.fp32_precision` shows what any of PyTorch's ways to set it has set; `allow_tf32` raises
    where the older and the newer ones are mixed.
    """
    if dtype != torch.float32 or device.type != "cuda":
        return False
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of biases, of states across time and of sums: float32 for half types, otherwise `dtype` itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gates, and states where a cell allows it, are kept for the backward alone.

    Of the half types float16: its error, 2^-11 of a number, is that of an exponential gate of size 1, which in bfloat16
    would be eight times as much. What is beyond its range is kept as its largest number.
    """
    return torch.float16 if dtype == torch.bfloat16 else dtype


def is_time_major(x: Tensor) -> bool:
    """Whether [B, T, ...] has time outermost in memory."""
    return not x.is_contiguous() and x.shape[0] > 1 and x.stride(0) < x.stride(1)


def rows_like(x: Tensor, *inner: int, steps: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor [B, steps, *inner], with batch and time in memory as x [B, T, ...] has them; of T steps and x's
    dtype where these are not given."""
    B, T = x.shape[:2]
    T = T if steps is None else steps
    if is_time_major(x):
        return x.new_empty(T, B, *inner, dtype=dtype).transpose(0, 1)
    return x.new_empty(B, T, *inner, dtype=dtype)


def as_rows(x: Tensor, like: Tensor) -> Tensor:
    """x [B, T, ...], dense, with batch and time in memory as `like` has them; x itself if it is already so."""
    return x.transpose(0, 1).contiguous().transpose(0, 1) if is_time_major(like) else x.contiguous()


def as_planes(x: Tensor, like: Tensor) -> Tensor:
    """As `as_rows`, for x [S-1, B, T, ...]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) if is_time_major(like) else x.contiguous()


def aux_gradient(grads: StateGradients, aux: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the gradients of aux as one tensor in `dtype`, in memory as aux; None if there are none."""
    if not grads.of_aux:
        return None
    stacked = torch.empty_like(aux, dtype=dtype)
    for room, d in zip(stacked, grads.aux, strict=True):
        room.zero_() if d is None else room.copy_(d)
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


def aligned(x: Tensor) -> Tensor:
    """x where accesses of 16 bytes can start from."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`, as its largest number where it is beyond its range."""
    largest = torch.finfo(dtype).max
    return x.to(dtype) if largest >= torch.finfo(x.dtype).max else x.clamp(-largest, largest).to(dtype)


def aux_dtype(cell: Cell, dtype: torch.dtype, all_states: bool) -> torch.dtype:
    """Of the states behind the first at every step: the state dtype, but `kept_dtype` if the cell allows it and they
    are not among the results."""
    return kept_dtype(dtype) if cell.float16_states and not all_states else state_dtype(dtype)


def empty_states(cell: Cell, rows: Tensor) -> Tensor:
    """Room for the states before or after all steps of `rows` [B, T, ..., N, D]: [S, B, N, D]."""
    B, _, *_, N, D = rows.shape
    return rows.new_empty(len(cell.states), B, N, D, dtype=state_dtype(rows.dtype))


def empty_aux(cell: Cell, Wx: Tensor, all_states: bool, training: bool) -> Tensor:
    """Room for the states behind the first: [S-1, B, T, N, D], without time steps if nobody needs them."""
    B, T, _, N, D = Wx.shape
    dtype = aux_dtype(cell, Wx.dtype, all_states)
    shape = (len(cell.states) - 1, T if all_states or training else 0)
    if is_time_major(Wx):
        return Wx.new_empty(*shape, B, N, D, dtype=dtype).transpose(1, 2)
    return Wx.new_empty(shape[0], B, shape[1], N, D, dtype=dtype)


def empty_gates(cell: Cell, Wx: Tensor, training: bool) -> Tensor:
    """Room for the gates of every step: [B, T, G, N, D], without time steps if there is no training."""
    steps, dtype = None if training else 0, kept_dtype(Wx.dtype)
    return rows_like(Wx, len(cell.gates), *Wx.shape[3:], steps=steps, dtype=dtype)
