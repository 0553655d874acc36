"""The classes of a cell's gates by their parts, which kernels/gates.cuh explains."""

from flashrnn.cells.definition import Cell


def recurrent_only(cell: Cell) -> tuple[str, ...]:
    """Return the recurrent gates without an input part, whose gradients are not in d_Wx."""
    return tuple(gate for gate in cell.recurrent_gates if gate not in cell.input_gates)


def varying(cell: Cell) -> tuple[str, ...]:
    """Return the gates with an input or a recurrent part. All other gates equal their biases at every step."""
    found = [gate for gate in cell.gates if gate in cell.input_gates or gate in cell.recurrent_gates]
    return tuple(found)  # compilers of fake kernels reject tuple() of a generator


def constant(cell: Cell) -> tuple[str, ...]:
    """Return the gates that are not `varying`."""
    return tuple(gate for gate in cell.gates if gate not in varying(cell))


def class_indices(names: tuple[str, ...], members: tuple[str, ...]) -> tuple[int, ...]:
    """Return the index of each gate or state among the `members` of a class, or -1 for one that is not a member."""
    return tuple(members.index(name) if name in members else -1 for name in names)
