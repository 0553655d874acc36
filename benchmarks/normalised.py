"""Time of cells that normalise over the units of a head, relative to an LSTM, a loop in PyTorch, or Haste."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import haste, ours
from benchmarks.cases import HIDDEN, MODES, TRAINING, Case, Job
from benchmarks.options import over
from benchmarks.peers import layer
from benchmarks.time_loop import compiled, graphed
from benchmarks.timing import QUICK, measure, random_inputs
from flashrnn import FlashRNN

_SIZES = ((12, 64, 16), (12, 64, 64), (1, HIDDEN, 16), (1, HIDDEN, 64))
LSTMS = tuple(Case("lstm", N, D, B) for N, D, B in _SIZES)
"""The cases with which a layernorm_lstm of the same sizes is compared."""
GRUS = tuple(Case("layernorm_gru", 1, 512, 16, T=64, dtype=dtype) for dtype in ("float32", "bfloat16"))
"""The cases that are compared with a compiled loop in PyTorch, captured as a CUDA graph; sizes of world models."""
LAYERS = tuple(
    Case(function, 1, D, 16, T, "float32")
    for function in ("layernorm_lstm", "layernorm_gru")
    for D, T in ((512, 64), (HIDDEN, 1024))
)
"""The cases that are compared with Haste's layers, including the input product."""


def rows(haste_sources: str | None) -> Iterator[dict]:
    """Milliseconds (ms: on the device; call_ms: including the host) and MiB in addition to the inputs (peak_mib) to
    compute h without gradients (forward), or with those of Wx, R and b (forward+backward). over: ratio to `over_what`,
    which is an LSTM, a layernorm_gru's loop in PyTorch that is compiled and captured as a CUDA graph, or, if its
    sources are given, Haste's layer in float32. The times of layers include the input product (input_ms)."""
    package = haste_sources and haste.load(Path(haste_sources))
    for mode in reversed(MODES):  # training first, in case of an interruption
        for lstm in LSTMS:
            case = replace(lstm, function="layernorm_lstm")
            yield _row(case, mode, _ours(case, mode), "lstm", _ours(lstm, mode))
        for gru in GRUS:
            yield _row(gru, mode, _ours(gru, mode), "CUDA graph of the compiled loop", _loop(gru, mode))
        for case in LAYERS if package else ():
            job = Job(case, mode)
            yield _row(case, mode, _layer(job), "Haste's layer", haste.run(job, QUICK, package))


def _row(case: Case, mode: str, found: dict, over_what: str, other: dict) -> dict:
    return {**vars(case), "mode": mode} | found | {"over_what": over_what, "other": other, "over": over(found, other)}


def _ours(case: Case, mode: str) -> dict:
    return ours.run(Job(case, mode), QUICK, "auto")


def _layer(job: Job) -> dict:
    errors = ours.check(job, "auto", "cuda")
    return {"errors": errors} | layer(job, QUICK, partial(FlashRNN, function=job.case.function), torch.float32)


def _loop(case: Case, mode: str) -> dict:
    training = mode == TRAINING
    inputs = [x.requires_grad_(training) for x in random_inputs(case.shapes(), getattr(torch, case.dtype))]
    loop = graphed(partial(gru_loop, compiled(gru_step, inputs)), inputs)
    return measure(lambda: loop(*inputs), inputs, training, QUICK)


def gru_loop(step: Callable[..., Tensor], Wx: Tensor, R: Tensor, b: Tensor) -> Tensor:
    """Return h [B, T, 1, D] of a layernorm_gru with one head, run step by step like world models in PyTorch.

    `step` is the compiled `gru_step`; compiling all steps of a sequence at once would take minutes.
    """
    B, _, _, _, D = Wx.shape
    bias, gain, shift = b.view(3, 3 * D).unbind()
    inputs, weight = Wx.flatten(2) + bias, R.flatten(0, 2).t()
    h, steps = Wx.new_zeros(B, D), []
    for x in inputs.unbind(1):
        h = step(x, h, weight, gain, shift)
        steps.append(h)
    return torch.stack(steps, dim=1).unsqueeze(2)


def gru_step(x: Tensor, h: Tensor, weight: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    """Return h [B, D] after one step."""
    gates = torch.addmm(x, h, weight)
    reset, candidate, update = F.layer_norm(gates, gates.shape[1:], 1 + gain, shift, eps=1e-3).chunk(3, dim=-1)
    update = torch.sigmoid(update - 1)
    return update * torch.tanh(torch.sigmoid(reset) * candidate) + (1 - update) * h
