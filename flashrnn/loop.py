"""The recurrence as plain PyTorch operators, for derivatives of every order and mode and for export to ONNX."""

from collections.abc import Iterable

import torch
from torch import Tensor

from flashrnn._torch_private import scan, transforms_active, unrolled
from flashrnn.cells import Cell
from flashrnn.dispatch import no_autocast
from flashrnn.memory_format import in_format, is_time_major
from flashrnn.problem import Inputs, state_dtype
from flashrnn.reference import Reference


def serves(backend: str, inputs: Inputs) -> bool:
    """Return whether the call runs as plain PyTorch operators.

    This is the case in an export to ONNX, and for derivatives that the backward pass of `vanilla` does not support.
    """
    if torch.compiler.is_compiling():
        return exported_to_onnx()
    return backend == Reference.name and (transforms_active() or has_tangents(inputs))


def exported_to_onnx() -> bool:
    """Return whether torch.onnx.export is tracing."""
    compiling = torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()
    return compiling and torch.onnx.is_in_onnx_export()


def has_tangents(inputs: Inputs) -> bool:
    """Return whether an input has a forward-mode derivative."""
    return any(x is not None and torch.autograd.forward_ad.unpack_dual(x).tangent is not None for x in inputs[:4])


def recurrence(
    cell: Cell, backend: str, dtype: torch.dtype, return_states: bool, inputs: Inputs
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return h, the last states and, if `return_states`, the other states of every step; the same as `vanilla`."""
    Wx, R, b, states, reset = inputs
    wide, (N, D) = state_dtype(dtype), R.shape[1:3]
    # `scan` exports to ONNX with variable sizes only if there is no axis for a single head, no operator in a step that
    # takes the batch size as an argument (`expand`), no memory format that depends on it, and no aliasing.
    product, heads = (torch.mm, 0) if N == 1 else (torch.bmm, slice(None))
    matrix = R.to(dtype).to(wide).permute(1, 3, 0, 2).flatten(2)[heads]  # [N, D, Gr*D]
    inputs_of = dict(zip(cell.input_gates, Wx.to(dtype).to(wide).permute(2, 1, 3, 0, 4)[:, :, heads], strict=True))
    nothing = torch.zeros_like(next(iter(inputs_of.values())))  # [T, N, B, D]
    biases = b.to(wide).unsqueeze(2)[:, heads]
    rows = [inputs_of.get(gate, nothing) + b for gate, b in zip(cell.gates, biases, strict=True)]
    if states is None:
        initial = [torch.zeros_like(rows[0][0], memory_format=torch.contiguous_format) for _ in cell.states]
    else:
        initial = _copies(states.to(wide).transpose(1, 2)[:, heads])
        initial[0] = initial[0].to(dtype).to(wide)

    def step(state: list[Tensor], given: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        pre = _copies(given[: len(cell.gates)])
        if reset is not None:
            state = [torch.where(given[-1][:, None], 0.0, s) for s in state]
        Rh = product(state[0], matrix)
        for r, gate in enumerate(cell.recurrent_gates):
            k = cell.gates.index(gate)
            pre[k] = pre[k] + Rh[..., r * D : (r + 1) * D]
        h, *others = cell.update(pre, _copies(state))
        new = [h.to(dtype).to(wide), *others]
        return new, _copies(new if return_states else new[:1])

    exporting = torch.compiler.is_compiling()
    run = scan if exporting else unrolled
    with no_autocast(Wx):
        last, every = run(step, initial, rows if reset is None else [*rows, reset.transpose(0, 1)])
    last = torch.stack(list(last))
    if N == 1:
        last, every = last.unsqueeze(1), [s.unsqueeze(1) for s in every]
    h, *others = (s.permute(2, 0, 1, 3) for s in every)
    h = h.to(dtype)
    if exporting:
        h, *others = _copies([h, *others])
    elif not is_time_major(Wx):
        h, others = in_format(h, Wx), [in_format(s, Wx) for s in others]
    return h, last.transpose(1, 2).contiguous(), tuple(others)


def _copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return copies, because a cell's step may change its arguments in place."""
    return [x.clone(memory_format=torch.contiguous_format) for x in tensors]


def gradients(
    cell: Cell, backend: str, dtype: torch.dtype, return_states: bool, inputs: Inputs, d_outputs: list[Tensor | None]
) -> list[Tensor | None]:
    """Return the gradients of all inputs but `reset`; they can be differentiated again.

    `d_outputs` are the gradients of h, of the last states and of the other states after every step.
    """
    # aliases, so that autograd does not propagate from one input to another
    aliases = [None if x is None else x.view_as(x) for x in inputs[:4]]
    h, last, others = recurrence(cell, backend, dtype, return_states, Inputs(*aliases, inputs.reset))
    given = [(out, d) for out, d in zip((h, last, *others), d_outputs, strict=True) if d is not None]
    wanted = [x for x in aliases if x is not None and x.requires_grad]
    outputs, d_outputs = zip(*given, strict=True)
    found = iter(torch.autograd.grad(outputs, wanted, d_outputs, create_graph=True, allow_unused=True))
    return [next(found) if x is not None and x.requires_grad else None for x in aliases]
