"""Time and memory of options (all states, a custom cell, TF32), relative to the same call without them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import ours
from benchmarks.cases import HIDDEN, MODES, TRAINING, Case, Job
from benchmarks.timing import QUICK, measure, random_inputs, tf32
from flashrnn import Cell, flashrnn


def _step(i, f, z, o, h, c):
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(z)
    return torch.sigmoid(o) * torch.tanh(c), c


OWN = Cell("own_lstm", _step, states=("h", "c"))
"""An LSTM as a user writes it."""
_OWN_NAME = f"{__name__}.OWN"


class Variant(NamedTuple):
    name: str
    case: Case
    return_states: bool = False
    of_all: bool = False  # gradients come from all states, not only from h
    tf32: bool = False


_SIZES = ((12, 64), (1, HIDDEN))
_LSTMS = tuple(Case("lstm", N, D, 16) for N, D in _SIZES)
GROUPS: tuple[tuple[Variant, ...], ...] = (
    *(
        (
            Variant("h alone", case),
            Variant("return_states", case, return_states=True),
            Variant("return_states, gradients of all", case, return_states=True, of_all=True),
        )
        for case in (*_LSTMS, *(replace(case, function="slstm") for case in _LSTMS))
    ),
    *((Variant("built in", case), Variant("own cell", replace(case, function=_OWN_NAME))) for case in _LSTMS),
    *(
        (Variant("float32", case), Variant("float32, TF32 allowed", case, tf32=True))
        for case in (replace(case, dtype="float32") for case in _LSTMS)
    ),
)
"""Variants of the same sizes; the first of each group is what the others are compared with."""


def rows() -> Iterator[dict]:
    """Milliseconds (ms: on the device; call_ms: including the host) and MiB in addition to the inputs (peak_mib) to
    compute h without gradients (forward) or with those of Wx, R and b (forward+backward), and the ratios to the first
    variant with the same sizes."""
    for group in GROUPS:
        for mode in MODES:
            variants = [variant for variant in group if mode == TRAINING or not variant.of_all]
            found = [measured(variant, mode) for variant in variants]
            for variant, row in zip(variants, found, strict=True):
                what = {"variant": variant.name, "mode": mode, **vars(variant.case)}
                yield what | row | {"over": over(row, found[0])}


def over(row: dict, first: dict) -> dict[str, float | None]:
    """Return times and memory relative to the first row; None if that is zero, such as the memory of a CUDA graph."""
    values = [{"ms": r["ms"]["p50"], "call_ms": r["call_ms"], "peak_mib": r["peak_mib"]} for r in (row, first)]
    return {name: round(value / of, 3) if (of := values[1][name]) else None for name, value in values[0].items()}


def measured(variant: Variant, mode: str) -> dict:
    """Return errors, time and memory."""
    case = variant.case
    with tf32(variant.tf32):
        errors = ours.check(Job(case, mode), "auto", "cuda")
        if variant.return_states:
            errors |= check_states(case, "auto", "cuda")
        inputs = random_inputs(case.shapes(), getattr(torch, case.dtype))
        return {"errors": errors} | measure(lambda: outputs(variant, inputs), inputs, mode == TRAINING, QUICK)


def outputs(variant: Variant, inputs: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
    """Return the outputs whose gradients are computed: h, or all states."""
    found = flashrnn(*inputs, function=variant.case.function, return_states=variant.return_states)
    return found[2] if variant.of_all else found[0]


def check_states(case: Case, backend: str, device: str) -> dict[str, float]:
    """Return relative errors of all states over a few steps."""
    case = replace(case, T=min(case.T, ours.CHECKED_STEPS))
    dtype = getattr(torch, case.dtype)
    inputs = random_inputs(case.shapes(), dtype, device)

    @torch.no_grad()
    def run(dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
        given = (x.to(dtype) for x in inputs)
        states = flashrnn(*given, function=case.function, backend=backend, return_states=True)[2]
        return {f"state {k}": state for k, state in enumerate(states)}

    return ours.errors(run, dtype, backend)
