"""`FlashRNN`, a drop-in replacement for nn.LSTM, nn.GRU and nn.RNN."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from flashrnn import (
    cpu_layer,
    cuda_layer,
    cudnn,
    directions,
    eager_layer,
    flat_weights,
    hoisting,
    layer_plan,
    onednn,
    torch_networks,
)
from flashrnn.cells import Cell, get_cell
from flashrnn.documents import of_cu_seqlens
from flashrnn.functional import check_reset, dtype_under_autocast
from flashrnn.initialization import init_input
from flashrnn.loop import exported_to_onnx
from flashrnn.projection import ProjectedRecurrence
from flashrnn.recurrence import Recurrence, check_sizes
from flashrnn.sequences import Packed, SideBySide, Whole


class FlashRNN(nn.Module):
    """A multi-layer, multi-head recurrent network with any cell; arguments, shapes and results are those of nn.LSTM.

    Args:
        input_size: number of input features.
        hidden_size: number of units of each layer and direction.
        num_layers: number of stacked layers.
        bias: learn one bias per gate and unit (nn.LSTM has two).
        batch_first: input and output are [B, T, features] instead of [T, B, features].
        dropout: probability of dropout on the outputs of all layers but the last.
        bidirectional: add a second network that reads the sequence backwards.
        proj_size: size that h is projected to, in cells such as the LSTM and with one head; 0 means no projection.
        device: device of the parameters.
        dtype: dtype of the parameters; None means PyTorch's default dtype.
        num_heads: number of heads of every layer. A unit reads only the previous h of its own head. 1 is the usual RNN.
        function: a cell, or the name of a registered one: "elman", "elman_relu", "gru", "lstm", "slstm",
            "layernorm_lstm", "layernorm_gru", or your own.
        backend: the name of a backend, or "auto" for the fastest that supports the call.
        recurrent_init: initial values of R, see `Recurrence`.
        bias_init: initial values of the biases, see `Recurrence`; the block index is the layer.

    The parameters do not depend on the backend. Each layer k and direction has `input_l{k}.weight`
    [Gi*hidden_size, features], `recurrent_l{k}.R` [Gr, N, D, D] and `recurrent_l{k}.b` [G, N, D]; module names of the
    backward direction end in `_reverse`. With `proj_size`, R is [Gr, 1, hidden_size, proj_size], and
    `recurrent_l{k}.projection.weight` is [proj_size, hidden_size]. `load_state_dict` also accepts the state_dict of
    nn.LSTM, nn.GRU, nn.RNN and their cells.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_heads: int = 1,
        function: str | Cell = "lstm",
        backend: str = "auto",
        recurrent_init: str = "standard",
        bias_init: str = "standard",
    ):
        super().__init__()
        check_sizes(input_size=input_size, hidden_size=hidden_size, num_layers=num_layers)
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout must be between 0 and 1, got {dropout}")
        if dropout and num_layers == 1:
            warnings.warn(f"dropout={dropout} acts between layers, and num_layers is 1", stacklevel=2)
        self.cell = get_cell(function)
        self.input_size, self.hidden_size, self.num_heads = input_size, hidden_size, num_heads
        self.num_layers, self.batch_first, self.dropout = num_layers, batch_first, dropout
        self.bidirectional, self.proj_size, self.bias = bidirectional, proj_size, bias
        self.output_size = proj_size or hidden_size
        self._directions = ("", "_reverse") if bidirectional else ("",)
        kind = partial(ProjectedRecurrence, proj_size=proj_size) if proj_size else Recurrence
        of_all = {"num_heads": num_heads, "function": self.cell, "bias": bias, "backend": backend}
        of_all |= {"recurrent_init": recurrent_init, "bias_init": bias_init, "num_blocks": num_layers}
        for layer in range(num_layers):
            self._add_layer(layer, partial(kind, hidden_size, block_index=layer, **of_all), device=device, dtype=dtype)
        self.register_load_state_dict_pre_hook(torch_networks.convert_state_dict)
        self.flatten_parameters()

    def _add_layer(self, layer: int, recurrence: Callable[..., Recurrence], **options) -> None:
        """Add the modules of a layer; `options`: device and dtype of their parameters."""
        features = self.input_size if layer == 0 else self.output_size * len(self._directions)
        for suffix in self._directions:
            linear = nn.Linear(features, len(self.cell.input_gates) * self.hidden_size, bias=False, **options)
            recurrent = recurrence(**options)
            init_input(linear.weight, self.hidden_size)
            self.add_module(f"input_l{layer}{suffix}", linear)
            self.add_module(f"recurrent_l{layer}{suffix}", recurrent)

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if instead := torch_networks.instead_of(name):
                raise AttributeError(f"{error}: {instead}", name=name, obj=self) from None
            raise

    def directions(self) -> list[str]:
        """Return the suffix of the module names of each layer and direction: l0, l0_reverse, l1, ..."""
        return [f"l{layer}{suffix}" for layer in range(self.num_layers) for suffix in self._directions]

    def reset_parameters(self) -> None:
        """Initialise all parameters again, according to `recurrent_init` and `bias_init`; by default as in nn.LSTM."""
        for module in self.children():
            if isinstance(module, Recurrence):
                module.reset_parameters()
            else:
                init_input(module.weight, self.hidden_size)

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Tensor | tuple[Tensor, ...] | None = None,
        reset: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, Tensor | tuple[Tensor, ...]]:
        """Run the network over a batch of sequences.

        Args:
            input: [T, B, input_size], [B, T, input_size] if batch_first, [T, input_size] without a batch, or a
                PackedSequence.
            hx: initial states, one tensor [num_layers * directions, B, hidden_size] per state of the cell, in a
                tuple if there are several: (h, c) for an LSTM, h for a GRU. None means zeros. With proj_size, the last
                axis of h has that size.
            reset: bool [B, T] for any batch_first, [1, T] without a batch. True where a document starts: the states
                before that step are zero.
            cu_seqlens: [number of documents + 1], the cumulative lengths of documents that are concatenated in a batch
                of one. It replaces `reset`; short documents run in parallel, see `flashrnn.flashrnn`.

        Returns:
            out [T, B, directions * hidden_size] in the layout of input (proj_size instead of hidden_size if given), and
            the last states in the layout of `hx`, in float32 for half types.

        Raises:
            ValueError, TypeError: shapes, dtypes or devices do not match; the message names the expected ones.
            UnsupportedProblem: the named backend does not support the call; the message gives the reason.
        """
        if cu_seqlens is not None and not (reset is hx is None and isinstance(input, Tensor)):
            raise ValueError("cu_seqlens are for a tensor; documents start at zero there, without hx and reset")
        if isinstance(input, PackedSequence):
            return self._forward_packed(input, hx, reset)
        if cu_seqlens is None and (done := self._fast_path(input, hx, reset)) is not None:
            return done
        self._check_input(input, (2, 3))
        if input.shape[int(self.batch_first and input.dim() == 3)] == 0:
            raise ValueError(f"input must have at least one time step, got {list(input.shape)}")
        if input.dim() == 2:
            out, last = self._run(input[None], self._initial(hx), _rows(input[None], reset, cu_seqlens))
            return out[0], self._last(last, batched=False)
        x = input if self.batch_first else input.transpose(0, 1)
        out, last = self._run(x, self._initial(hx, x.shape[0]), _rows(x, reset, cu_seqlens))
        return out if self.batch_first else out.transpose(0, 1), self._last(last)

    def step(
        self, input: Tensor, hx: Tensor | tuple[Tensor, ...] | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, Tensor | tuple[Tensor, ...]]:
        """Run one time step: input [B, input_size] -> out [B, hidden_size] and the new states.

        Args:
            input: [B, input_size], the input of the step.
            hx: the states that `forward` or `step` returned; None means zeros.
            reset: bool [B], True for sequences that start a document here: their states are set to zero first.

        Raises:
            ValueError: the network is bidirectional, or as in `forward`.
        """
        if self.bidirectional:
            raise ValueError("a bidirectional network cannot be stepped: its output depends on the whole sequence")
        if reset is not None:
            check_reset(reset, len(input))
        if isinstance(input, Tensor) and input.dim() == 2:
            if (done := cpu_layer.run(self, input, hx, reset)) is not None:
                return done
            if (done := cuda_layer.run(self, input, hx, reset)) is not None:
                return done
            time, of_steps = int(self.batch_first), None if reset is None else reset.unsqueeze(1)
            if (done := eager_layer.run(self, input.unsqueeze(time), hx, of_steps)) is not None:
                return done[0].squeeze(time), done[1]
        self._check_input(input, (2,))
        reset = None if reset is None else reset.unsqueeze(1)
        x = input.unsqueeze(1)
        out, last = self._run(x, self._initial(hx, x.shape[0]), _rows(x, reset, None))
        return out.squeeze(1), self._last(last)

    def _fast_path(self, x: Tensor, states, reset: Tensor | None) -> tuple | None:
        """Return the results of `forward` with less overhead; None if that is impossible or an argument is wrong."""
        if not isinstance(x, Tensor) or x.dim() != 3 or torch.compiler.is_compiling():
            return None
        time = int(self.batch_first)
        steps = x.shape[time]
        if steps == 1 and not self.bidirectional:
            if reset is not None:
                check_reset(reset, x.shape[1 - time], 1)
            if (done := cpu_layer.run(self, x, states, None if reset is None else reset[:, 0])) is not None:
                return done
        for of_pytorch in (onednn.run, cudnn.run) if reset is None else ():
            if (done := of_pytorch(self, x, states)) is not None:
                return done
        if steps >= hoisting.FEWEST_STEPS:
            of_layer = self.cell, self.recurrent_l0.backend, dtype_under_autocast(x), x.device, steps
            if hoisting.serves(*of_layer, self.num_heads, self.recurrent_l0.head_dim):
                return None
        if (done := cuda_layer.run(self, x, states, reset)) is not None:
            return done
        return eager_layer.run(self, x, states, reset)

    def _check_input(self, x: Tensor, dims: tuple[int, ...]) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"input must be a tensor or, for whole sequences, a PackedSequence, got {type(x).__name__}")
        if x.dim() not in dims or x.shape[-1] != self.input_size:
            allowed = " or ".join(f"{d}-D" for d in dims)
            raise ValueError(f"input must be {allowed} with {self.input_size} features last, got {list(x.shape)}")
        if not x.is_floating_point():
            raise TypeError(f"input must be a floating-point tensor, got {x.dtype}")
        weight = self.recurrent_l0.R
        if x.device != weight.device:
            raise ValueError(f"input is on {x.device}, but the network is on {weight.device}; move them to one device")
        if dtype_under_autocast(x) != dtype_under_autocast(weight):
            raise TypeError(
                f"input is {x.dtype}, but the weights are {weight.dtype}; give input.to({weight.dtype}), or "
                f"convert the network with .to({x.dtype})"
            )

    def _forward_packed(self, x: PackedSequence, states, reset: Tensor | None):
        self._check_input(x.data, (2,))
        T, B = len(x.batch_sizes), int(x.batch_sizes[0])
        if reset is not None:
            check_reset(reset, B, T)
        initial = self._initial(states, B)
        if initial is not None and x.sorted_indices is not None:
            initial = _sorted(initial, x.sorted_indices)
        data, last = self._run(x.data, initial, Packed(x, initial is not None, reset))
        if x.unsorted_indices is not None:
            last = _sorted(last, x.unsorted_indices)
        return PackedSequence(data, x.batch_sizes, x.sorted_indices, x.unsorted_indices), self._last(last)

    def _run(self, x: Tensor, initial: Sequence | None, rows: Whole | SideBySide) -> tuple[Tensor, list]:
        """Run all layers.

        Args:
            x: the input in the layout that `rows` reads.
            initial: the initial states of each layer and direction in the format of `_initial`, or None.
            rows: the layout of the sequences.

        Returns:
            The output in the layout of x, and the last states of each layer and direction.
        """
        last = []
        for layer in range(self.num_layers):
            states = None if initial is None else initial[len(last) : len(last) + len(self._directions)]
            outputs, ends = self._layer(layer, x, states, rows)
            last += ends
            x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
            if layer + 1 < self.num_layers:
                x = nn.functional.dropout(x, self.dropout, self.training)
        return x, last

    def _layer(self, layer: int, x: Tensor, states: Sequence | None, rows: Whole | SideBySide) -> tuple[list, list]:
        """Run one layer; return h in the layout of x and the last states, both for each direction."""
        if self.bidirectional and not self.proj_size:
            done = directions.at_once(self, layer, x, states, rows)
            if done is not None:
                return done
        outputs, ends = [], []
        for direction, suffix in enumerate(self._directions):
            state = None if states is None else states[direction]
            h, end = self._direction(f"l{layer}{suffix}", bool(direction), x, state, rows)
            outputs.append(h)
            ends.append(end)
        return outputs, ends

    def _direction(self, name: str, backward: bool, x: Tensor, state, rows: Whole | SideBySide) -> tuple:
        """Run one layer in one direction; return h in the layout of x, and the last states in the format of `state`."""
        linear, recurrent = self.get_submodule(f"input_{name}"), self.get_submodule(f"recurrent_{name}")
        x = rows.spread(x, backward)
        # A Linear preserves the memory layout of its input, and the kernels read time-major gates without a copy.
        if exported_to_onnx():  # there, is_contiguous() would become a condition on the sizes
            x = x.clone(memory_format=torch.contiguous_format)
        Wx = linear(x.transpose(0, 1)).transpose(0, 1) if not x.is_contiguous() else linear(x)
        Wx = Wx.unflatten(-1, (len(self.cell.input_gates), self.num_heads, -1))
        every = rows.all_states and len(self.cell.states) > 1
        h, last, *states = recurrent(Wx, state, rows.resets(backward), return_states=every)
        end = rows.ends(h, last, states[0][1:] if every else (), backward)
        return rows.gather(h.flatten(-2), backward), end

    def _initial(self, states, *batch: int) -> Sequence | None:
        """Return the user's states for each layer and direction in the format of `_direction`.

        This is [S, B, N, D], or with proj_size a tuple of tensors [B, N, D or proj_size]. `batch` is the batch size, or
        empty if the user's states have no batch axis.
        """
        if states is None:
            return None
        names = self.cell.states
        given = states if isinstance(states, tuple | list) else (states,)
        sizes = [self.output_size, *[self.hidden_size] * (len(names) - 1)]
        expected = [[self.num_layers * len(self._directions), *batch, size] for size in sizes]
        got = [list(s.shape) if isinstance(s, Tensor) else s for s in given]
        if got != expected:
            shapes = " and ".join(map(str, expected if self.proj_size else expected[:1]))
            raise ValueError(f"hx must be {len(names)} tensor(s) {names} of shape {shapes}, got {got}")
        given = given if batch else [s.unsqueeze(1) for s in given]
        if self.proj_size:
            return [*zip(*(s.unsqueeze(-2) for s in given), strict=True)]
        return torch.stack(tuple(given)).unflatten(-1, (self.num_heads, -1)).unbind(1)

    def _last(self, ends: list, batched: bool = True) -> Tensor | tuple[Tensor, ...]:
        """Return the last states of each layer and direction in the user's format.

        They are not views, which could neither be detached in place nor saved without their base.
        """
        names = range(len(self.cell.states))
        states = tuple(torch.stack([end[i].flatten(-2 if batched else 0) for end in ends]) for i in names)
        return states if len(states) > 1 else states[0]

    def explain(
        self, batch: int, dtype: torch.dtype | None = None, *, training: bool = True, reset: bool = False
    ) -> str:
        """Return a short text on the backend of a call on the network's device, and why no faster one is used.

        Args:
            batch: number of sequences; their length does not matter.
            dtype: dtype of the computation; None means that of the weights.
            training: a backward pass follows.
            reset: the call has resets, or sequences of different lengths.
        """
        return layer_plan.explain(self, batch, dtype or self.recurrent_l0.R.dtype, training, reset)

    @classmethod
    def from_torch(cls, module: nn.RNNBase | nn.RNNCellBase, *, backend: str = "auto") -> "FlashRNN":
        """Return a FlashRNN with the weights of an nn.LSTM, nn.GRU or nn.RNN, or of one of their cells for `step`.

        It has one head and the same results.
        """
        return torch_networks.from_torch(cls, module, backend)

    def to_torch(self) -> nn.LSTM | nn.GRU | nn.RNN:
        """Return an nn.LSTM, nn.GRU or nn.RNN with the weights and results of this network; its second bias is zero.

        Raises:
            ValueError: PyTorch has no such network, because of the cell or the number of heads.
        """
        return torch_networks.to_torch(self)

    def flatten_parameters(self) -> None:
        """Put the weights of an LSTM on a GPU into one buffer, so that cuDNN need not copy them in every call.

        As in nn.LSTM, this happens automatically when the network is created, moved, converted, copied or loaded.
        """
        flat_weights.flatten(self)

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        self.flatten_parameters()
        return self

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.flatten_parameters()

    def __prepare_scriptable__(self) -> nn.Module:
        """Return the module that torch.jit.script compiles instead of this one."""
        if torch_networks.has_counterpart(self):
            return self.to_torch()
        raise NotImplementedError(
            f"TorchScript has no network with function={self.cell.name!r} and num_heads={self.num_heads}: use "
            "torch.export, torch.compile or torch.onnx.export(..., dynamo=True)"
        )

    def extra_repr(self) -> str:
        return (
            f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}, batch_first={self.batch_first}, "
            f"dropout={self.dropout}, bidirectional={self.bidirectional}"
            + (f", proj_size={self.proj_size}" if self.proj_size else "")
        )


def _sorted(states: Sequence, indices: Tensor) -> list:
    """Return the states of each layer and direction with their sequences in the order of `indices` [B]."""
    return [s[:, indices] if isinstance(s, Tensor) else [one[indices] for one in s] for s in states]


def _rows(x: Tensor, reset: Tensor | None, cu_seqlens: Tensor | None) -> Whole | SideBySide:
    """Return the layout of the sequences in x [B, T, features]."""
    if cu_seqlens is not None:
        return of_cu_seqlens(cu_seqlens, x)
    if reset is not None:
        check_reset(reset, *x.shape[:2])
    return Whole(reset)
