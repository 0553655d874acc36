"""A layer outside of compilers and transformations, with input product and recurrence as one autograd function.

As modules they would be ten operators with their own gradients, which for short sequences take more time on the host
than on the GPU.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from flashrnn import cpu_layer
from flashrnn._torch_private import autograd_alone, onednn_computes
from flashrnn.dispatch import no_autocast, padding, run_forward
from flashrnn.eager import apart, as_dtype, cast, recurrence_gradients, together
from flashrnn.functional import check_reset, dtype_under_autocast
from flashrnn.head_size import with_head_size
from flashrnn.layer_weights import fit, without_hooks
from flashrnn.problem import PLAIN, Inputs, StateGradients, state_dtype
from flashrnn.recurrence import Recurrence
from flashrnn.reference import Reference


def run(network: nn.Module, x: Tensor, states, reset: Tensor | None) -> tuple | None:
    """Run a FlashRNN on a batch of sequences with one autograd function per layer.

    Args:
        network: a FlashRNN.
        x: [T, B, features], or [B, T, features] if the network is batch_first.
        states: the caller's initial states.
        reset: [B, T], or None.

    Returns:
        The results of `FlashRNN.forward`. None if the call is not supported, and if an argument is wrong, which the
        caller then reports.
    """
    if network.bidirectional or network.proj_size or not (_is_plain(x) and x.numel() and autograd_alone()):
        return None
    if x.shape[-1] != network.input_size or not (x.is_contiguous() or x.transpose(0, 1).is_contiguous()):
        return None
    dtype, (B, T) = dtype_under_autocast(x), x.shape[:2] if network.batch_first else x.shape[1::-1]
    layers = [(network._modules[f"input_l{k}"], network._modules[f"recurrent_l{k}"]) for k in range(network.num_layers)]
    if not all(_serves(*layer, x, dtype) for layer in layers):
        return None
    if reset is not None:
        check_reset(reset, B, T)
        if not (_is_plain(reset) and reset.device == x.device):
            return None
    if states is not None and (states := _by_layer(network, states, B)) is None:
        return None
    ends = []
    for k, (product, recurrent) in enumerate(layers):
        if k:
            x = nn.functional.dropout(x, network.dropout, network.training)
        given = None if states is None else states[:, k]
        x, *end = _layer(network.batch_first, recurrent, dtype, x, product.weight, given, reset)
        ends.append(end)
    return x, last_states(ends)


def last_states(ends: Sequence[Sequence[Tensor]]) -> Tensor | tuple[Tensor, ...]:
    """Return the last states in the format of `FlashRNN.forward`, given those of each layer."""
    last = ends[0] if len(ends) == 1 else [torch.cat(of_state) for of_state in zip(*ends, strict=True)]
    return last[0] if len(last) == 1 else tuple(last)


def _is_plain(x) -> bool:
    return type(x) in PLAIN and x.device.type in ("cpu", "cuda")


def _serves(product: nn.Module, recurrent: nn.Module, x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a layer is supported: it has no hooks, and weights of the right size, device and dtype.

    Backend `vanilla` is not supported, because it has derivatives that this function does not have.
    """
    if not without_hooks(product, recurrent) or recurrent.backend == Reference.name:
        return False
    for weight in (product.weight, recurrent.R, recurrent.b):
        if weight is not None and not (
            type(weight) in PLAIN
            and weight.device == x.device
            and (weight.dtype == x.dtype or dtype_under_autocast(weight) == dtype)
        ):
            return False
    return fit(recurrent, product.weight, recurrent.R, recurrent.b)


def _by_layer(network: nn.Module, states, batch: int) -> Tensor | None:
    """Return the caller's states as [S, layers, B, N, D]; None if their number or shapes are wrong."""
    given = states if isinstance(states, tuple | list) else (states,)
    shape, device = (network.num_layers, batch, network.hidden_size), network.recurrent_l0.R.device
    if len(given) != len(network.cell.states):
        return None
    if not all(_is_plain(s) and s.shape == shape and s.device == device and s.is_floating_point() for s in given):
        return None
    return torch.stack(tuple(given)).view(len(given), *shape[:2], network.num_heads, -1)


def _layer(batch_first: bool, recurrent: Recurrence, dtype: torch.dtype, x, W, states, reset) -> tuple[Tensor, ...]:
    """Return the output in the layout of x, and the last one [1, B, H] of each state."""
    if (done := cpu_layer.sequences(recurrent, batch_first, x, W, states, reset)) is not None:
        return done
    given = x, W, recurrent.R, recurrent.b, states
    sizes = recurrent.num_heads, recurrent.head_dim, dtype, x.device, torch.is_grad_enabled()
    if units := padding(recurrent.backend, recurrent.cell.key, *sizes):
        results = _of_inputs(batch_first, recurrent, dtype, reset, *_wider(units, dtype, *given))
        return _narrower(recurrent, *results)
    return _of_inputs(batch_first, recurrent, dtype, reset, *given)


def _wider(units: int, dtype: torch.dtype, x, W, R, b, states) -> tuple[Tensor | None, ...]:
    """Return the inputs of a layer with each head padded by `units` units of zeros.

    The input product then writes padded rows directly, without a copy.
    """
    W = as_dtype(W, dtype).unflatten(0, (-1, R.shape[-1]))
    b, states = (None if t is None else pad(t, (0, units)) for t in (b, states))
    return x, pad(W, (0, 0, 0, units)).flatten(0, 1), pad(as_dtype(R, dtype), (0, units, 0, units)), b, states


def _narrower(recurrent: Recurrence, out: Tensor, *ends: Tensor) -> tuple[Tensor, ...]:
    """Return the results of a layer without the padding of `_wider`."""
    out, *ends = (t.unflatten(-1, (recurrent.num_heads, -1)) for t in (out, *ends))
    return tuple(t.flatten(-2) for t in with_head_size([out, *ends], recurrent.head_dim))


def _of_inputs(batch_first: bool, recurrent: Recurrence, dtype: torch.dtype, reset, *given) -> tuple[Tensor, ...]:
    x = given[0]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given):
        return Layer.apply(batch_first, recurrent, dtype, reset, *given)
    with no_autocast(x):
        inputs = _inputs(batch_first, recurrent, dtype, reset, *given)
        _, (h, _, last), _ = run_forward(recurrent.backend, recurrent.cell, inputs, False, training=False)
    return _results(batch_first, h, last)


def _inputs(batch_first: bool, recurrent: Recurrence, dtype: torch.dtype, reset, x, W, R, b, states) -> Inputs:
    rows, swapped = _rows(x)
    sizes = *rows.shape[:2], len(recurrent.cell.input_gates), *R.shape[1:3]
    Wx = as_dtype(nn.functional.linear(_factor(rows, dtype), _factor(W, dtype)), dtype).view(sizes)
    if batch_first == swapped:
        Wx = Wx.transpose(0, 1)
    if b is None:
        b = Wx.new_zeros(len(recurrent.cell.gates), *sizes[3:], dtype=state_dtype(dtype))
    return cast(dtype, Wx, R, b, states, reset)


def _factor(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x rounded to `dtype` as a factor of the layer's matrix products, which is float32 on some processors.

    Without instructions for bfloat16, a product in bfloat16 takes ten times as long as one in float32.
    """
    x = as_dtype(x, dtype)
    is_slow = dtype == torch.bfloat16 and x.device.type == "cpu" and not onednn_computes(dtype)
    return x.float() if is_slow else x


def _rows(x: Tensor) -> tuple[Tensor, bool]:
    """Return x with batch and time in the order of memory, and whether they were swapped."""
    swapped = not x.is_contiguous()
    return x.transpose(0, 1) if swapped else x, swapped


def _results(batch_first: bool, h: Tensor, last: Tensor) -> tuple[Tensor, ...]:
    """Return h [B, T, N, D] in the layout of the caller, and the last states, which are not views."""
    out = (h if batch_first else h.transpose(0, 1)).flatten(2)
    return out.data, *apart(last.view(len(last), 1, *last.shape[1:]).flatten(3))


class Layer(torch.autograd.Function):
    """The autograd function of `_layer`."""

    @staticmethod
    def forward(ctx, batch_first, recurrent, dtype, reset, x, W, R, b, states):
        cell, backend = recurrent.cell, recurrent.backend
        with no_autocast(x):
            inputs = _inputs(batch_first, recurrent, dtype, reset, x, W, R, b, states)
            taken, (h, aux, last), gates = run_forward(backend, cell, inputs, False, training=True)
        out, *ends = _results(batch_first, h, last)
        ctx.save_for_backward(x, W, out, inputs.R, inputs.b, reset, aux, gates, *([] if states is None else [states]))
        ctx.set_materialize_grads(False)
        ctx.leading = 4  # number of arguments before x, which have no gradients
        ctx.call = batch_first, False, cell, backend, taken, dtype, None if b is None else b.dtype
        return out, *ends

    @staticmethod
    def backward(ctx, d_out, *d_ends):
        return layer_gradients(ctx, ctx.saved_tensors, d_out, d_ends)


def layer_gradients(
    ctx, saved: tuple[Tensor | None, ...], d_out: Tensor | None, d_ends: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a layer's inputs, under any mode of PyTorch; `ctx` and `saved` are those of `Layer`."""
    batch_first, bidirectional, cell, backend, taken, dtype, b_dtype = ctx.call
    x, W, out, R, b, reset, aux, gates, *given_states = saved
    is_step = x.dim() == 2
    if is_step:
        x, out, d_out = (None if t is None else t.unsqueeze(1) for t in (x, out, d_out))
    states = None
    if given_states:
        states = as_dtype(together(given_states), state_dtype(dtype)).view(len(cell.states), -1, *R.shape[1:3])
    of_residual = R, states, reset, by_heads(out, R, batch_first), aux, gates
    grads = StateGradients(by_heads(d_out, R, batch_first), (None,) * len(aux), of_last_states(d_ends, R))
    call = cell, backend, taken, of_residual, b, b_dtype, grads, bidirectional
    of_Wx, of_R, of_b, of_states = recurrence_gradients(*call)
    x_wanted, W_wanted, _, b_wanted, *states_wanted = ctx.needs_input_grad[ctx.leading :]
    of_x, of_W = product_gradients(batch_first, dtype, of_Wx, x, W, x_wanted, W_wanted)
    of_x = of_x.squeeze(1) if is_step and x_wanted else of_x
    of_given = [None] * len(states_wanted)
    if any(states_wanted):
        of_given = of_states.view(len(of_given), *given_states[0].shape).unbind()
    return *(None,) * ctx.leading, of_x, of_W, of_R, of_b if b_wanted else None, *of_given


def of_last_states(d_ends: Sequence[Tensor | None], R: Tensor) -> Tensor | None:
    """Return the gradients of a layer's last states [1, B, H] as [S, B, N, D]; None if there are none."""
    given = [d for d in d_ends if d is not None]
    if not given:
        return None
    whole = torch.cat([torch.zeros_like(given[0]) if d is None else d for d in d_ends])
    return whole.view(len(d_ends), -1, *R.shape[1:3])


def product_gradients(
    batch_first: bool, dtype: torch.dtype, of_Wx: Tensor, x: Tensor, W: Tensor, x_wanted: bool, W_wanted: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x, in its layout, and of W, given that of the input product [B, T, Gi, N, D]."""
    rows, swapped = _rows(x)
    of_Wx = (of_Wx.transpose(0, 1) if batch_first == swapped else of_Wx).reshape(-1, W.shape[0])
    of_Wx, of_x, of_W = _factor(of_Wx, dtype), None, None
    with no_autocast(x):
        if x_wanted:
            of_x = as_dtype(torch.mm(of_Wx, _factor(W, dtype)), dtype).view(rows.shape)
            of_x = of_x.transpose(0, 1) if swapped else of_x
        if W_wanted:
            of_W = as_dtype(torch.mm(of_Wx.t(), _factor(rows, dtype).flatten(0, 1)), dtype)
    return of_x, of_W


def by_heads(x: Tensor | None, R: Tensor, batch_first: bool) -> Tensor | None:
    """Return x, in the caller's layout, as [B, T, N, D]."""
    if x is None:
        return None
    x = x.view(*x.shape[:2], *R.shape[1:3])  # unflatten does not support batched gradients
    return x if batch_first else x.transpose(0, 1)
