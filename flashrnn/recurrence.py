"""The recurrent part of a layer as a module."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from flashrnn.cells import Cell, get_cell
from flashrnn.cpu.backend import CpuFused
from flashrnn.cpu.step import Step
from flashrnn.dispatch import check_backend, choose
from flashrnn.functional import dtype_under_autocast, flashrnn
from flashrnn.initialization import BIAS, RECURRENT, check_init, init_bias, init_recurrent
from flashrnn.problem import Problem, state_dtype


class Recurrence(nn.Module):
    """The recurrent part of a layer: recurrent matrices `R`, biases `b` and the time loop, without input projection.

    Args:
        hidden_size: number of units of all heads together.
        num_heads: number of heads, each with its own recurrent matrices; it divides hidden_size.
        function: the name of a registered cell, or a `flashrnn.Cell`.
        bias: learn biases; otherwise `b` is None, which means zeros.
        backend: the name of a backend, or "auto" for the fastest that supports the call.
        recurrent_init: "standard" or "zeros" (see `initialization`).
        bias_init: "zeros", "standard" or "powerlaw".
        block_index: index of the layer or block in the model, from 0; "powerlaw" depends on it.
        num_blocks: number of layers or blocks.
        device: device of the parameters.
        dtype: dtype of the parameters; None means PyTorch's default dtype.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int = 1,
        function: str | Cell = "lstm",
        bias: bool = True,
        backend: str = "auto",
        recurrent_init: str = "standard",
        bias_init: str = "zeros",
        block_index: int = 0,
        num_blocks: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_sizes(hidden_size=hidden_size, num_heads=num_heads)
        if hidden_size % num_heads:
            raise ValueError(
                f"num_heads must divide hidden_size, got hidden_size={hidden_size} and num_heads={num_heads}"
            )
        check_init("recurrent_init", recurrent_init, RECURRENT)
        check_init("bias_init", bias_init, BIAS)
        self.cell = get_cell(function)
        self.backend = check_backend(backend)
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, hidden_size // num_heads
        self.recurrent_init, self.bias_init = recurrent_init, bias_init
        self.block_index, self.num_blocks = block_index, num_blocks
        options = {"device": device, "dtype": dtype}
        self.R = nn.Parameter(
            torch.empty(len(self.cell.recurrent_gates), num_heads, self.head_dim, self.head_dim, **options)
        )
        b = torch.empty(len(self.cell.gates), num_heads, self.head_dim, **options)
        self.register_parameter("b", nn.Parameter(b) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise R and b again, as `recurrent_init` and `bias_init` say."""
        init_recurrent(self.R, self.recurrent_init)
        if self.b is not None:
            init_bias(self.b, self.bias_init, self.cell, self.block_index, self.num_blocks)

    def matrix(self) -> Tensor:
        """Return the recurrent matrices [Gr, N, D, D] that multiply h."""
        return self.R

    def forward(
        self, Wx: Tensor, states: Tensor | None = None, reset: Tensor | None = None, return_states: bool = False
    ) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Run the recurrence over sequences, with the arguments, results and errors of `flashrnn.flashrnn`."""
        options = {"reset": reset, "return_states": return_states}
        return flashrnn(Wx, self.matrix(), self.b, states, self.cell, self.backend, **options)

    def stepper(self, states: Tensor) -> Callable[[Tensor], Tensor] | None:
        """Return a function that runs single time steps with less overhead than `forward`, without gradients.

        Args:
            states: [S, B, N, D], contiguous, as `forward` returns them. The function changes them in place.

        Returns:
            A function of Wx [B, Gi, N, D] that returns h [B, N, D] in a buffer that the next call overwrites. It
            contains copies of the current weights. None if the backend is not `cpu_fused`, or if `forward` is as fast.
        """
        plain = states.device.type == "cpu" and states.dtype == self.R.dtype == dtype_under_autocast(self.R)
        plain = plain and states.dtype == state_dtype(states.dtype)
        if not plain or not states.is_contiguous():
            return None
        sizes = states.shape[2:]
        problem = Problem(self.cell, *sizes, states.dtype, states.device, training=False, reset=False)
        if choose(self.backend, problem).name != CpuFused.name:
            return None
        return Step(self.cell, self.R, self.b, states)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, num_heads={self.num_heads}, function={self.cell.name!r}, backend={self.backend!r}"


def check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int):
            raise TypeError(f"{name} must be an integer, got {size!r}")
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
