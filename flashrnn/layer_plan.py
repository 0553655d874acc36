"""The backend of a FlashRNN's calls, and why no faster one is used, as text."""

import torch
from torch import nn

from flashrnn import cudnn, directions, onednn, plan
from flashrnn.cuda.resident import layers
from flashrnn.gpu import nvidia_gpu


def explain(network: nn.Module, batch: int, dtype: torch.dtype, training: bool, reset: bool) -> str:
    """Return the text of `FlashRNN.explain`."""
    recurrent = network.recurrent_l0
    device = recurrent.R.device
    sizes = network.num_heads, recurrent.head_dim, batch, dtype
    text = plan.explain(network.cell, *sizes, nvidia_gpu(device), training, reset, recurrent.backend)
    if not reset and device.type == "cpu":
        text += _onednn(network, batch, dtype)
    elif not reset:
        text += cudnn.explain(network, batch, dtype, training) or _layers(network, batch, dtype, training)
    if network.bidirectional and not (reset or network.proj_size):
        of_one = directions.problem(network, dtype, training, reset)
        if directions.is_faster(of_one, batch, recurrent.backend):
            text += "\nboth directions at once, as the heads of one recurrence"
    return text


def _onednn(network: nn.Module, batch: int, dtype: torch.dtype) -> str:
    """Return a line if oneDNN runs batches of whole sequences, otherwise an empty string."""
    x = torch.zeros(batch, 2, network.input_size, dtype=dtype)  # a short call shows which kernel is used
    x = x if network.batch_first else x.transpose(0, 1).contiguous()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        taken = onednn.run(network, x, None)
    return "" if taken is None else "\ninstead, PyTorch's own kernel runs batches of whole sequences: it is faster"


def _layers(network: nn.Module, batch: int, dtype: torch.dtype, training: bool) -> str:
    """Return a line if the layers run at the same time, otherwise an empty string."""
    if network.num_layers == 1 or network.bidirectional or network.proj_size or (network.dropout and training):
        return ""
    of_one, backend = directions.problem(network, dtype, training, reset=False), network.recurrent_l0.backend
    if not layers.are_faster(of_one, batch, network.num_layers, backend):
        return ""
    return f"\nlayers at the same time, where sequences have at least {layers.FEWEST_STEPS} steps"
