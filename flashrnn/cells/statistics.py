"""Statistics that a forward pass stores for the gradient of a step with reductions, so that its backward has fewer.

Statistics are values that are equal in all units of a head and depend only on gates and states, such as means and
reciprocal deviations. A gate that the gradient only needs as (gate - mean) * scale is stored in this form. If the gate
itself were stored, it would be rounded; with a large mean, the rounded gate minus the exact mean would differ much from
the value that the forward pass has used. A state that the step reduces over units, as in a norm of an LSTM's c, is read
as it was stored after the step. It is therefore stored in the state dtype (`problem.aux_dtype`).
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flashrnn.cells.graph import REDUCTIONS, TRUTH, Graph, moved


class Normalised(NamedTuple):
    """A gate that is stored as (gate - mean) * scale; the names of these statistics."""

    scale: str
    mean: str | None  # None: zero


class Statistics(NamedTuple):
    """The stored values of a gradient.

    forward: gates, previous states and `after_<state>` -> `statistic<k>` in order, and `stored_<gate>` for every
        normalised gate.
    gradient: gates (normalised ones as `stored_<gate>`), previous states, `after_<state>`, statistics and
        `d_new_<state>` -> `d_<gate>` for every gate and `d_<state>` for every previous state.
    after: the states that the step itself reduces over units.
    needed: the number of statistics, from the first on, that `gradient` reads. Others serve to undo normalisations.
    normalised: normalised gates by name.
    """

    forward: Graph
    gradient: Graph
    after: tuple[str, ...]
    needed: int
    normalised: dict[str, Normalised]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all statistics, in order."""
        return tuple(name for name in self.forward.outputs if name.startswith("statistic"))


def statistics_of(step: Graph, joint: Graph, gates: Sequence[str], states: Sequence[str]) -> Statistics:
    """Return what to store for `joint`, the gradient of `step` as a function of gates, states and `d_new_<state>`.

    In a chain of operations on values that are equal in all units, the last ones are stored: the reciprocal deviation,
    and not the variance.
    """
    cotangents = [f"d_new_{state}" for state in states]
    after = tuple(state for state in states[1:] if _reduces_over(step, step.outputs[f"new_{state}"]))
    both = step.joined(joint)
    news = {both.outputs[f"new_{state}"]: f"after_{state}" for state in after}
    joint = both.extract({name: both.outputs[name] for name in joint.outputs}, news)
    storable = _storable(joint, cotangents)
    found = _normalised(joint, gates, storable)
    needed = _needed_statistics(joint, storable, found)
    to_undo = {k for scale, mean in found.values() for k in (scale, mean) if k is not None}
    names = {k: f"statistic{i}" for i, k in enumerate([*sorted(needed), *sorted(to_undo - needed)])}
    stored = {k: f"stored_{_gate_of(joint, k, gates)}" for k in found}
    gradient = joint.extract(joint.outputs, names | stored)
    outputs = {name: index for index, name in (names | stored).items()}
    normalised = {
        stored[k].removeprefix("stored_"): Normalised(names[scale], None if mean is None else names[mean])
        for k, (scale, mean) in found.items()
    }
    return Statistics(joint.extract(outputs), gradient, after, len(needed), normalised)


def storing(step: Graph, statistics: Statistics) -> Graph:
    """Return `step` with the stored values as further outputs."""
    whole = Graph()
    new = whole.copy(step.outputs.values(), step)
    whole.outputs = {name: new[index] for name, index in step.outputs.items()}
    whole.norms = moved(step.norms, new)
    after = {f"after_{state}": whole.outputs[f"new_{state}"] for state in statistics.after}
    here: dict[int, int] = {}
    for index in statistics.forward.needed(statistics.forward.outputs.values()):
        node = statistics.forward.nodes[index]
        here[index] = after[node.value] if node.value in after else whole.copied(node, here)
    whole.outputs |= {name: here[index] for name, index in statistics.forward.outputs.items()}
    return whole


def _reduces_over(step: Graph, index: int) -> bool:
    return step.nodes[index].args != () and any(n.op in REDUCTIONS and index in n.args for n in step.nodes)


def _storable(joint: Graph, cotangents: Sequence[str]) -> set[int]:
    """Return the nodes that may be statistics.

    Results of `max` may not, because the gradient compares them with stored gates and states, which are rounded: it
    must compute the maximum of these again.
    """
    excluded: list[bool] = []
    storable = set()
    for index, node in enumerate(joint.nodes):
        of_itself = node.value in cotangents or node.op == "unit_max"
        excluded.append(of_itself or any(excluded[a] for a in node.args))
        if joint.is_uniform(index) and not excluded[index] and node.op not in ("const", *TRUTH):
            storable.add(index)
    return storable


def _needed_statistics(joint: Graph, storable: set[int], normalised: Iterable[int]) -> set[int]:
    """Return the statistics that the gradient reads.

    Statistics that are added to values computed by the gradient are excluded. Such values are computed from rounded
    numbers, and if the mean is large, they differ from those of the forward pass.
    """
    storable = set(storable)
    while True:
        order = joint.needed(joint.outputs.values(), given=storable.union(normalised))
        computed = (joint.nodes[k] for k in order if k not in storable and k not in normalised)
        sums = (node.args for node in computed if node.op in ("add", "sub"))
        terms = {a for args in sums if not any(_is_after(joint, k) for k in args) for a in args} & storable
        if not terms:
            return storable.intersection(order)
        storable -= terms


def _is_after(joint: Graph, index: int) -> bool:
    return joint.nodes[index].op == "input" and str(joint.nodes[index].value).startswith("after_")


def _normalised(joint: Graph, gates: Sequence[str], storable: set[int]) -> dict[int, tuple[int, int | None]]:
    """Return the nodes (gate - mean) * scale that are the only use of a gate in the gradient, with scale and mean."""
    users: dict[int, list[int]] = {}
    for index in joint.needed(joint.outputs.values(), given=storable):
        if index not in storable:
            for a in set(joint.nodes[index].args):
                users.setdefault(a, []).append(index)
    found = {}
    for index, node in enumerate(joint.nodes):
        if node.op != "input" or node.value not in gates:
            continue
        centered, mean = index, None
        match [joint.nodes[k] for k in users.get(index, ())]:
            case [one] if one.op == "sub" and one.args[0] == index and one.args[1] in storable:
                (centered,), mean = users[index], one.args[1]
        match [joint.nodes[k] for k in users.get(centered, ())]:
            case [one] if one.op == "mul" and (scales := storable.intersection(one.args)):
                found[users[centered][0]] = (*scales, mean)
    return found


def _gate_of(graph: Graph, index: int, gates: Sequence[str]) -> str:
    """Return the gate from which a normalised gate is computed."""
    node = graph.nodes[index]
    if node.op == "input":
        return str(node.value)
    return next(_gate_of(graph, a, gates) for a in node.args if not graph.is_uniform(a))
