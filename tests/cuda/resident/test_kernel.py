"""The choice of a tiling by the register spills of its binary."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from flashrnn import get_cell
from flashrnn.cuda.build import Binary
from flashrnn.cuda.resident import kernel
from flashrnn.cuda.resident.kernel import SPILLED, compile_best
from flashrnn.cuda.resident.tiling import Tiling
from flashrnn.cuda.spec import KernelSpec, Variant
from flashrnn.gpu import named_gpu

VARIANT = Variant(aux=torch.float16, training=True)
SPEC = KernelSpec("forward", get_cell("lstm"), 1, 768, 16, torch.bfloat16, named_gpu("H100"), VARIANT)
WIDE = Tiling(
    unit_tiles=3, k_slices=2, batch_tiles=1, sequences=8, blocks=16, grid=False, stages=8, register_fragments=44
)
OTHER = replace(WIDE, k_slices=4)


@pytest.fixture
def compile_(monkeypatch):
    """Return a function of tilings with spilled bytes, and with the number of instructions that load these among
    products, that returns the choice and the number of compilations."""

    compile_bucket = kernel._compile_bucket.__wrapped__

    def choose(
        spills: list[tuple[Tiling, int]], loads: Mapping[Tiling, int] = MappingProxyType({})
    ) -> tuple[Tiling, int]:
        compiled = []

        def build(source: str, *_) -> Binary:
            compiled.append(source)
            return Binary(source.encode(), "", 255, dict(spills)[tilings[source]], Path())

        tilings = {str(choice): choice for choice, _ in spills}
        monkeypatch.setattr(kernel.solver, "tilings", lambda *_: (choice for choice, _ in spills))
        monkeypatch.setattr(kernel, "prelude", lambda spec, choice, *_: str(choice))
        monkeypatch.setattr(kernel, "build", build)
        monkeypatch.setattr(kernel, "spills_between_products", lambda code: (loads.get(tilings[code.decode()], 0), 0))
        monkeypatch.setattr(kernel, "bucket", lambda spec, solver: spec)
        monkeypatch.setattr(kernel, "_compile_bucket", compile_bucket)
        _, choice = compile_best(SPEC)
        return choice, len(compiled)

    return choose


def with_registers(choice: Tiling, register_fragments: int) -> Tiling:
    return replace(choice, register_fragments=register_fragments)


def test_first_tiling_without_spills_is_chosen(compile_):
    assert compile_([(WIDE, 0), (OTHER, 0)]) == (WIDE, 1)
    assert compile_([(WIDE, SPILLED), (OTHER, 0)]) == (WIDE, 1)
    assert compile_([(WIDE, SPILLED + 1), (OTHER, 0)]) == (OTHER, 2)


def test_tilings_that_would_spill_as_much_are_not_compiled(compile_):
    fewer_stages, more = replace(WIDE, stages=4), with_registers(WIDE, 48)
    less = with_registers(WIDE, 40)
    assert compile_([(WIDE, 300), (fewer_stages, 0), (more, 0), (less, 8), (OTHER, 0)]) == (less, 2)


LESS = [with_registers(WIDE, fragments) for fragments in (40, 36, 32)]


def test_less_of_R_in_registers_is_tried_before_other_tilings(compile_):
    assert compile_([(WIDE, 300), (OTHER, 0), (LESS[1], 8), (LESS[0], 300)]) == (LESS[1], 3)
    assert compile_([(WIDE, 300), (OTHER, 0), *((one, 300) for one in LESS)]) == (OTHER, 4)
    assert compile_([(WIDE, 300), (OTHER, 0), (LESS[0], SPILLED), (LESS[1], 0)]) == (LESS[0], 2)
    assert compile_([(WIDE, SPILLED), (OTHER, 0), (LESS[0], 0)]) == (WIDE, 1)


def test_less_of_R_in_registers_is_tried_if_many_spilled_registers_are_loaded_among_products(compile_):
    tilings = [(WIDE, 100), (OTHER, 0), (LESS[0], 90), (LESS[1], 20), (LESS[2], 8)]
    assert compile_(tilings, loads={WIDE: 2}) == (WIDE, 1)
    assert compile_(tilings, loads={WIDE: 3}) == (LESS[1], 3)
    assert compile_(tilings, loads={WIDE: 3, LESS[1]: 1}) == (LESS[2], 4)
    assert compile_(tilings, loads={WIDE: 3, LESS[0]: 2, LESS[1]: 2, LESS[2]: 2}) == (LESS[1], 4)
    assert compile_(tilings[:3], loads={WIDE: 3}) == (LESS[0], 2)
    assert compile_([(WIDE, 300), *tilings[1:]], loads={LESS[0]: 3}) == (LESS[1], 3)
    assert compile_([(WIDE, 100), (OTHER, 0), (replace(LESS[0], stages=3), 0)], loads={WIDE: 3}) == (WIDE, 1)


def test_tiling_with_least_spills_of_six_is_chosen(compile_):
    spills = [(with_registers(WIDE, 44 - 4 * k), 500 - 10 * k if k != 3 else 400) for k in range(7)]
    assert compile_(spills) == (with_registers(WIDE, 32), 6)


def test_choice_is_logged(compile_, caplog):
    with caplog.at_level(logging.INFO, "flashrnn"):
        compile_([(WIDE, 200), (OTHER, 0)])
    assert caplog.messages == [f"forward of lstm 1 x 768, batch 16, bfloat16 on H100: {OTHER}, compiled 2"]
