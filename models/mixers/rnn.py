"""The recurrent mixer: a linear map to the gates, the recurrence of any cell, and a norm per head."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashrnn import Cell, Recurrence, get_cell

from .causal_conv import CausalConv
from .step_context import StepContext

# The gates whose input passes through the causal convolution. In xLSTM's sLSTM these are the input and forget gates,
# but not the cell input and output gate (z, o). The GRU's counterparts are r and z.
CONV_GATES = {"slstm": ("i", "f"), "lstm": ("i", "f"), "gru": ("r", "z")}


class RNNMixer(nn.Module):
    """A recurrent mixer with any cell: y = norm(recurrence(gates(x))), without an output projection.

    The linear map to Gi gates has Gi d² parameters, the recurrent matrices of Gr gates and N heads have Gr d² / N. The
    state is (recurrent state [B, S, N, D],), and with a convolution also its last inputs [B, width - 1, d].

    Args:
        d_model: width of input and output, num_heads times the head size.
        num_heads: number of heads, each with its own recurrent matrices and its own norm.
        function: the name of a registered cell, or a `flashrnn.Cell`.
        conv_width: width of a causal convolution with SiLU before some of the gates; 0 means none, xLSTM has 4.
        conv_gates: names of the gates after the convolution. None means those in `CONV_GATES`, or all gates for cells
            that are not listed there.
        backend: see `flashrnn.Recurrence`.
        recurrent_init: see `flashrnn.Recurrence`.
        bias_init: see `flashrnn.Recurrence`.
        block_index: index of the block in the backbone, for initial values that depend on it.
        num_blocks: number of blocks.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int = 1,
        function: str | Cell = "lstm",
        conv_width: int = 0,
        conv_gates: tuple[str, ...] | None = None,
        backend: str = "auto",
        recurrent_init: str = "standard",
        bias_init: str = "zeros",
        block_index: int = 0,
        num_blocks: int = 1,
    ) -> None:
        super().__init__()
        cell = get_cell(function)
        if num_heads < 1 or d_model % num_heads:
            raise ValueError(f"num_heads={num_heads} must be a positive divisor of d_model={d_model}")
        if conv_width < 0:
            raise ValueError(f"conv_width={conv_width}: expected 0 (no convolution) or a positive width")
        if conv_gates is not None and not conv_width:
            raise ValueError(
                f"conv_gates={list(conv_gates)} without a convolution (conv_width=0); xLSTM has conv_width=4"
            )
        if conv_gates is None:
            conv_gates = CONV_GATES.get(cell.name, cell.input_gates)
        if unknown := set(conv_gates) - set(cell.input_gates):
            raise ValueError(
                f"conv_gates: cell {cell.name!r} has no input gate {sorted(unknown)}; it has {list(cell.input_gates)}"
            )
        self.num_heads = num_heads
        self.conv_fed = [gate in conv_gates for gate in cell.input_gates]
        self.conv = CausalConv(d_model, conv_width) if conv_width else None
        self.gates = nn.Linear(d_model, len(cell.input_gates) * d_model, bias=False)
        self.recurrence = Recurrence(
            d_model,
            num_heads=num_heads,
            function=cell,
            backend=backend,
            recurrent_init=recurrent_init,
            bias_init=bias_init,
            block_index=block_index,
            num_blocks=num_blocks,
        )
        self.norm_weight = nn.Parameter(torch.ones(d_model))

    def forward(
        self, x: Tensor, state: tuple[Tensor, ...] | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        B, T, d = x.shape
        N, D = self.num_heads, d // self.num_heads
        new_state = ()
        if self.conv is None:
            gates = self.gates(x)
        else:
            convolved, conv_state = self.conv(x, None if state is None else state[1], reset)
            new_state = (conv_state,)
            gates = self._gates_of(x, convolved)
        recurrent = None if state is None else state[0].transpose(0, 1)
        h, last = self.recurrence(gates.view(B, T, -1, N, D), recurrent, reset)
        y = F.layer_norm(h, (D,)) * self.norm_weight.view(N, D)
        return y.reshape(B, T, d), (last.transpose(0, 1), *new_state)

    def step(
        self, x: Tensor, state: tuple[Tensor, ...], context: StepContext, residual: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        (B, d), N = x.shape, self.num_heads
        new_state = ()
        if self.conv is None:
            gates = self.gates(x)
        else:
            convolved, conv_state = self.conv.step(x, state[1])
            new_state = (conv_state,)
            gates = self._gates_of(x, convolved)
        gates, new = gates.view(B, -1, N, d // N), state[0]
        if (stepper := context.once(self, lambda: self.recurrence.stepper(new.transpose(0, 1)))) is not None:
            h = stepper(gates)  # updates the state in place
        else:
            h, last = self.recurrence(gates.unsqueeze(1), new.transpose(0, 1))
            new = last.transpose(0, 1)
        normed = F.layer_norm(h, (d // N,)).view(B, d)
        return torch.addcmul(residual, normed, self.norm_weight), (new, *new_state)

    def _gates_of(self, x: Tensor, convolved: Tensor) -> Tensor:
        """Return the inputs of all gates [..., Gi d], computed from x or from the convolution, both [..., d]."""
        d = x.shape[-1]
        inputs = (convolved if fed else x for fed in self.conv_fed)
        weights = self.gates.weight.view(-1, d, d)
        return torch.cat([F.linear(i, w) for i, w in zip(inputs, weights, strict=True)], dim=-1)
