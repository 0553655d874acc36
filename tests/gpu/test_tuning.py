"""Tilings chosen by measurements."""

import torch

from flashrnn import get_cell
from flashrnn.cuda.resident.tuned import saved_tiling
from flashrnn.cuda.resident.tuning import tune
from flashrnn.cuda.spec import KernelSpec
from flashrnn.gpu import device_gpu
from tests.suite import Case, check


def test_fastest_tiling_is_stored_and_correct():
    cell, sizes = get_cell("elman"), (3, 96, 24, torch.bfloat16)
    trials = list(tune(cell, *sizes, count=3))
    for direction in ("forward", "backward"):
        measured = [trial for trial in trials if trial.direction == direction]
        assert len(measured) == 3
        fastest = min(measured, key=lambda trial: trial.us)
        assert saved_tiling(KernelSpec(direction, cell, *sizes, device_gpu(0))) == fastest.tiling
    check("cuda_fused", Case(cell, B=24, T=9, N=3, D=96), torch.bfloat16, "cuda:0")
