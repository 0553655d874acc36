"""Calls of the kernels: what all calls of the same sizes share, and what each call launches.

If there are few time steps, the host takes longer than the GPU. Therefore, everything that depends only on sizes is
computed once.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count

import torch
from torch import Tensor
from torch.nn.functional import linear

from flashrnn.cells import Cell
from flashrnn.cells.gates import constant, recurrent_only
from flashrnn.cuda.arguments import Argument
from flashrnn.cuda.launch import Launch
from flashrnn.cuda.reset_bits import reset_bits
from flashrnn.cuda.resident import concurrent_gradient
from flashrnn.cuda.resident.concurrent_gradient import ConcurrentGradient
from flashrnn.cuda.resident.source import gate_format
from flashrnn.cuda.resident.tiling import Tiling
from flashrnn.cuda.short_gradients import ShortGradients
from flashrnn.cuda.spec import KernelSpec
from flashrnn.cuda.sum_of_partials import sum_of_partials
from flashrnn.cuda.weight_gradient import WeightGradient
from flashrnn.cuda.zeros import zeros
from flashrnn.memory_format import aligned, contiguous, empty_in_format
from flashrnn.problem import (
    Gradients,
    Inputs,
    StateGradients,
    States,
    empty_aux,
    empty_states,
    state_dtype,
    tf32_allowed,
)
from flashrnn.residual import Residual, empty_gates, saturated


@dataclass(frozen=True, eq=False)
class Plan:
    """The launches of a call: everything that depends only on its sizes."""

    spec: KernelSpec
    tiling: Tiling
    launches: tuple[tuple[int, Launch], ...]  # with their numbers of groups
    workspace: int  # bytes of global memory through which a group exchanges
    overlapped: concurrent_gradient.Tiling | None = None  # of d_R, if its kernel overlaps with the loop
    short: ShortGradients | None = None  # otherwise, for a backward of few steps
    weight_gradient: WeightGradient | None = None  # otherwise

    def launch(self, arguments: dict[str, Argument], like: Tensor) -> None:
        """Launch the kernels, with a workspace on the device of `like`."""
        for groups, launch in self.launches:
            workspace = None
            if self.workspace:
                workspace = like.new_empty(groups * self.workspace, dtype=torch.uint8)
            arguments["workspace"], arguments["launch"] = workspace, next(_LAUNCHES)
            launch(groups, arguments)


_LAUNCHES = count(secrets.randbits(62))  # for GridBarrier: unlikely to be in memory by chance


def producers(spec: KernelSpec, tiling: Tiling) -> int:
    """Return the number of blocks of the time loop."""
    return tiling.batches(spec.batch) * spec.heads * tiling.blocks


class Backward:
    """What backward passes share whose residuals differ only in their values."""

    def __init__(self, plan: Plan, cell: Cell, h: Tensor, device: torch.device) -> None:
        """`h` has the format of that of the calls, on PyTorch's meta device."""
        B, _, N, D = h.shape
        self.plan, self.gate_format = plan, gate_format(cell, N, D, h.dtype)
        self.over_gates = not plan.tiling.grid and self.gate_format == "PNDG"  # d_Wx may overwrite the gates
        states = empty_states(cell, h)
        d_b = states.new_empty(plan.tiling.batches(B), len(cell.gates), N, D)
        d_Wx, d_u = (empty_in_format(h, len(gates), N, D) for gates in (cell.input_gates, recurrent_only(cell)))
        self.h, self.d_Wx, self.d_u, self.d_states, self.d_b = map(_format, (h, d_Wx, d_u, states, d_b))
        self.without_d_u = None if d_u.numel() else torch.empty_like(d_u, device=device)
        self.state_bytes, self.reads_bias, self.of_aux = states.nbytes, bool(constant(cell)), plan.spec.variant.d_aux
        self.needs_shape = not (plan.short or (plan.weight_gradient and plan.weight_gradient.has_kernel))  # of h
        rows = h.unsqueeze(2)
        aux, gates = empty_aux(cell, rows, False, True), empty_gates(cell, rows, True, self.gate_format)
        self.aux_stride, self.gates_stride = aux.stride(), gates.stride()

    def gradients(
        self, residual: Residual, grads: StateGradients, x: Tensor | None = None
    ) -> tuple[Gradients, Tensor | None] | None:
        """Return the gradients of a call and, given its layer's input x, perhaps that of W.

        `residual` has the call's inputs and results; for W see `BackwardCall.gradients_of_layer`. h (whose shape may
        differ) and its gradient are dense in the memory format of the call. Returns None if a result has other strides
        than the call gave it, for example after hooks of saved tensors, or if the precision setting has changed.
        """
        h, gates, spec = residual.h, residual.gates, self.plan.spec
        if residual.aux.stride() != self.aux_stride or gates.stride() != self.gates_stride:
            return None
        if h.dim() == 4 and h.stride() != self.h[1]:
            return None
        if spec.dtype == torch.float32 and tf32_allowed(spec.dtype, gates.device) != spec.variant.tf32:
            return None
        call = BackwardCall(self, residual, grads)
        call.launch()
        return call.gradients_of_layer(x)


class BackwardCall:
    """A backward pass: call `launch`, and directly afterwards `gradients`."""

    def __init__(self, of: Backward, residual: Residual, grads: StateGradients) -> None:
        """h, aux, gates and the gradient of h are dense, gates in the format of `of`. Their shapes may differ."""
        R, states, reset, h, aux, gates, _, donated, _, b, _ = residual
        self._of, self._residual, wide = of, residual, of.d_states[2]
        h, gates = aligned(h), aligned(gates)
        self._h = h if h.dim() == 4 or not of.needs_shape else h.as_strided(*of.h[:2])
        if donated and of.over_gates:
            numbers = gates if gates.dtype == h.dtype else gates.view(h.dtype)
            self.d_Wx = numbers.as_strided(*of.d_Wx[:2])
        else:
            self.d_Wx = _empty(of.d_Wx, h)
        self._d_u = _empty(of.d_u, h) if of.without_d_u is None else of.without_d_u
        self._d_b, self._d_states = _empty(of.d_b, h), _empty(of.d_states, h)
        self.d_h = _empty(of.h, h).zero_() if grads.h is None else aligned(grads.h)
        if states is None:
            initial = first_aux = zeros(h.device.index, of.state_bytes)
        else:
            initial = states.contiguous()
            first_aux = aligned(saturated(initial[1:], aux.dtype))
        self._concurrent, plan = None, of.plan
        if plan.overlapped:
            blocks = producers(plan.spec, plan.tiling)
            self._concurrent = ConcurrentGradient(plan.spec, plan.overlapped, blocks, self._h, states, reset)
        self._arguments = {
            "R": R.contiguous(),
            **({"bias": b.to(wide).contiguous()} if of.reads_bias else {}),
            "initial": initial,
            "resets": None if reset is None else reset_bits(reset),
            "h": h,
            "aux": aligned(aux),
            "first_aux": first_aux,
            "gates": gates,
            "d_h": self.d_h,
            **(_d_aux(grads, aux, wide) if of.of_aux else {}),
            "d_last": None if grads.last is None else grads.last.contiguous(),
            "d_x": self.d_Wx,
            "d_u": self._d_u,
            "d_bias": self._d_b,
            "d_initial": self._d_states,
            "progress": self._concurrent and self._concurrent.progress,
        }

    def launch(self, **chunks: Argument) -> None:
        """Launch the time loop. `chunks`: see `Forward.launch`."""
        self._of.plan.launch({**self._arguments, **chunks}, self.d_Wx)

    def gradients(self) -> Gradients:
        return self.gradients_of_layer(None)[0]

    def gradients_of_layer(self, x: Tensor | None) -> tuple[Gradients, Tensor | None]:
        """Return the gradients and, if the kernel for those of R and b can also compute it, that of W.

        x is the layer's input, contiguous and in the memory order of h.
        """
        _, states, reset, *_ = residual = self._residual
        b_dtype = residual.b_dtype or self._d_b.dtype
        if short := self._of.plan.short:
            x = x if x is not None and short.multiplies(x) else None
            d_R, d_b, d_W = short(self.d_Wx, self._d_u, self._h, states, reset, self._d_b, b_dtype, x)
            return Gradients(self.d_Wx, d_R, d_b, self._d_states), d_W
        if self._concurrent:
            d_R = self._concurrent(self.d_Wx, self._d_u)
        else:
            d_R = self._of.plan.weight_gradient(self.d_Wx, self._d_u, self._h, states, reset)
        d_b = sum_of_partials(self._d_b, b_dtype)
        return Gradients(self.d_Wx, d_R, d_b, self._d_states), None


class Forward:
    """Forward passes of inputs that differ only in their values.

    For biases and initial states, None stands for zeros.
    """

    def __init__(
        self, plan: Plan, cell: Cell, results: States, gates: Tensor, backward: Callable[[], Backward]
    ) -> None:
        """`results` and `gates` have the formats of those of the calls, on PyTorch's meta device."""
        self._plan, self._backward, made = plan, backward, (*results, gates)
        self._made = [_format(one) for one in made]
        self.states, self.batch, N, D = results.last.shape
        self.size = N * D  # of h
        self.gate_format = gate_format(cell, N, D, results.h.dtype)
        self._biases = len(cell.gates) * N * D * results.last.element_size()  # bytes

    @cached_property
    def backward(self) -> Backward:
        """Return what the backward passes of these calls share."""
        return self._backward()

    @property
    def tiling(self) -> Tiling:
        return self._plan.tiling

    def __call__(self, inputs: Inputs) -> tuple[States, Tensor]:
        """Return the states and the gates. Wx is dense and 16-byte aligned."""
        h, aux, last, gates = [_empty(one, inputs.Wx) for one in self._made]
        Wx, R, b, states, reset = inputs
        self.launch(Wx, R, b, contiguous(states), reset, h, aux, last, gates)
        return States(h, aux, last), gates

    def inference(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return h and the last states only, for the same inputs as `__call__`."""
        Wx, R, b, states, reset = inputs
        h, last = [_empty(one, Wx) for one in self._made[:3:2]]
        self.launch(Wx, R, b, contiguous(states), reset, h, None, last, None)
        return h, last

    def of_layer(
        self,
        x: Tensor,
        W: Tensor,
        R: Tensor,
        b: Tensor | None,
        states: Sequence[Tensor],
        reset: Tensor | None,
        training: bool,
    ) -> tuple[Tensor, Tensor | None, Sequence[Tensor], Tensor | None]:
        """Run a layer; return h in the layout of x, aux, the last states [1, B, H] and gates.

        The arguments are those of `SingleStep.of_layer`; x has the layout of the calls, and reset is [B, T]. aux and
        gates are None without `training`.
        """
        Wx = linear(x, W)
        h = x.new_empty(*x.shape[:-1], self.size)
        last = x.new_empty(self.states, self.batch, self.size, dtype=state_dtype(x.dtype))
        aux, gates = self.empty_residual(x) if training else (None, None)
        self.launch(Wx, R, b, joined_states(states) if states else None, reset, h, aux, last, gates)
        return h, aux, each_state(last), gates

    def empty_residual(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return memory for aux and gates, as `launch` takes it, on the device of x."""
        return tuple([_empty(one, x) for one in self._made[1::2]])

    def launch(
        self,
        Wx: Tensor,
        R: Tensor,
        b: Tensor | None,
        initial: Tensor | int | None,
        reset: Tensor | None,
        h: Tensor,
        aux: Tensor | None,
        last: Tensor,
        gates: Tensor | None,
        **chunks: Argument,
    ) -> None:
        """Launch a forward pass that writes h, aux, last and gates.

        The shapes of these and of Wx are ignored; only their memory counts.

        `initial` is contiguous, or the address of as many numbers as `last` has. If aux and gates are None, they are
        not stored. `chunks` are further arguments of the kernels of concurrent layers: see layers.py.
        """
        arguments = {
            "x": Wx,
            "R": R.contiguous(),
            "bias": zeros(Wx.device.index, self._biases) if b is None else b.contiguous(),
            "initial": _or_zeros(initial, last),
            "resets": None if reset is None else reset_bits(reset),
            "h": h,
            "aux": aux,
            "last": last,
            "gates": gates,
            **chunks,
        }
        self._plan.launch(arguments, Wx)


def joined_states(states: Sequence[Tensor]) -> Tensor | int:
    """Return the states [1, B, H] of a layer as one tensor, or only their address if they are contiguous in memory."""
    first, size = states[0].data_ptr(), states[0].nbytes
    if all([state.data_ptr() == first + i * size for i, state in enumerate(states)]):
        return first
    return torch.cat(list(states))


def each_state(states: Tensor) -> Sequence[Tensor]:
    """Return the states [S, B, H] as tensors [1, B, H] that are not views, which cannot always be changed in place."""
    return (states,) if states.shape[0] == 1 else states.unsafe_chunk(states.shape[0])


_Format = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # plain tuples are read in half the time of a torch.Size


def _format(x: Tensor) -> _Format:
    return tuple(x.shape), x.stride(), x.dtype


def _empty(of_format: _Format, like: Tensor) -> Tensor:
    shape, stride, dtype = of_format
    return like.new_empty_strided(shape, stride, dtype=dtype)


def _or_zeros(states: Tensor | int | None, like: Tensor) -> Tensor | int:
    """Return `states`, or at least as many zero bytes as `like` has if it is None."""
    return zeros(like.device.index, like.nbytes) if states is None else states


def _d_aux(grads: StateGradients, aux: Tensor, dtype: torch.dtype) -> dict[str, Tensor | None]:
    return {f"d_aux_{i}": None if d is None else _in_memory_as(aux, d, dtype) for i, d in enumerate(grads.aux)}


def _in_memory_as(aux: Tensor, d: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient d [B, T, N, D] of one of the states in `aux`, in that state's memory format."""
    if d.dtype == dtype and d.stride() == aux.stride()[1:]:
        return aligned(d)
    return torch.empty_like(aux[0], dtype=dtype).copy_(d)
