"""A recurrence whose recurrent matrix multiplies a projection of h, as in nn.LSTM with `proj_size`."""

import torch
from torch import Tensor, nn

from flashrnn.cells import Cell
from flashrnn.initialization import init_input
from flashrnn.recurrence import Recurrence


class ProjectedRecurrence(Recurrence):
    """A `Recurrence` with one head whose inputs and outputs are o = P h instead of h, with P [proj_size, hidden_size].

    Because R (P h) = (R P) h, every backend can run it with the recurrent matrix R P. The h that belongs to an initial
    o is unknown, so R o is added to the first input instead.

    Args:
        hidden_size: number of units of the cell.
        proj_size: number of features of o, fewer than hidden_size.
        device: device of the parameters.
        dtype: dtype of the parameters; None means PyTorch's default dtype.
        options: other arguments of `Recurrence`.

    Raises:
        ValueError: the cell reads h itself and not only R h, as a GRU does, or has a recurrent gate without an input.
    """

    def __init__(self, hidden_size: int, proj_size: int, *, device=None, dtype=None, **options):
        super().__init__(hidden_size, device=device, dtype=dtype, **options)
        if not 0 < proj_size < hidden_size:
            raise ValueError(
                f"proj_size must be 0 or more, and smaller than hidden_size={hidden_size}, got {proj_size}"
            )
        if self.num_heads > 1:
            raise ValueError(f"proj_size is for networks of one head, got num_heads={self.num_heads}")
        if not set(self.cell.recurrent_gates) <= set(self.cell.input_gates):
            raise ValueError(f"proj_size needs an input at every recurrent gate; {self.cell.name!r} has gates without")
        if _reads_h(self.cell):
            raise ValueError(f"proj_size is for cells that read R h alone, as an LSTM does; {self.cell.name!r} reads h")
        gates, heads, units, _ = self.R.shape
        self.R = nn.Parameter(self.R.new_empty(gates, heads, units, proj_size))
        self.projection = nn.Linear(hidden_size, proj_size, bias=False, device=device, dtype=dtype)
        self._places = [self.cell.input_gates.index(gate) for gate in self.cell.recurrent_gates]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "projection"):
            init_input(self.projection.weight, self.hidden_size)

    def matrix(self) -> Tensor:
        return self.R @ self.projection.weight

    def forward(
        self,
        Wx: Tensor,
        states: tuple[Tensor, ...] | None = None,
        reset: Tensor | None = None,
        return_states: bool = False,
    ) -> tuple:
        """Run the recurrence over sequences like `Recurrence.forward`, with o [B, T, 1, proj_size] instead of h.

        States are tuples of tensors [B, 1, proj_size or D].
        """
        if states is not None:
            o, *others = states
            Wx = self._with_initial(Wx, o, reset)
            states = torch.stack([torch.zeros_like(others[0]), *others]) if others else None
        h, last, *every = super().forward(Wx, states, reset, return_states)
        out = self.projection(h)
        last = (out[:, -1].to(last.dtype), *last[1:])
        return (out, last, (out, *every[0][1:])) if every else (out, last)

    def stepper(self, states: Tensor) -> None:
        """Return None, because a projected network has no stepper."""

    def _with_initial(self, Wx: Tensor, o: Tensor, reset: Tensor | None) -> Tensor:
        """Return Wx [B, T, Gi, 1, D] with R o added to its first step, except where that step is reset."""
        share = torch.einsum("gnij,bnj->bgni", self.R, o.to(self.R.dtype))
        if reset is not None:
            share = share.masked_fill(reset[:, 0, None, None, None], 0.0)
        of_inputs = torch.zeros_like(Wx[:, 0]).index_add(1, torch.tensor(self._places, device=Wx.device), share.to(Wx))
        return torch.cat([Wx[:, :1] + of_inputs[:, None], Wx[:, 1:]], dim=1)


def _reads_h(cell: Cell) -> bool:
    """Return whether a step uses the previous h itself, not only R h."""
    gates, others = ([torch.full((1,), 0.5, device="cpu") for _ in names] for names in (cell.gates, cell.states[1:]))
    h = torch.full((1,), torch.nan, device="cpu")
    return any(state.isnan().any() for state in cell.update(gates, [h, *others]))
