"""The kernels of Mamba's scan in Triton's interpreter, compared with mambapy's scan."""

import os
import subprocess
import sys

import pytest
import torch

from models.mixers.selective_scan import SelectiveScan, selective_scan

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # set before Triton's import, as its reductions require
in_interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", __file__]
    run = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    assert "3 passed" in run.stdout


def inputs(rows, T, channels, states, seed=0):
    torch.manual_seed(seed)
    u, step = torch.randn(rows, T, channels), torch.rand(rows, T, channels) / 2
    A, first = -3 * torch.rand(channels, states), torch.randn(rows, channels, states)
    B, C = torch.randn(2, rows, T, states)
    return [x.clone().requires_grad_() for x in (u, step, A, B, C, first)]


def gradients(y, last, tensors):
    weights = torch.linspace(-1, 1, y.numel()).view_as(y), torch.linspace(1, -1, last.numel()).view_as(last)
    return torch.autograd.grad((y * weights[0]).sum() + (last * weights[1]).sum(), tensors)


def assert_close(ours, expected):
    for x, other in zip(ours, expected, strict=True):
        assert (x - other).norm() <= 1e-5 * other.norm()


@in_interpreter
@pytest.mark.parametrize("sizes", [(2, 5, 70, 16), (3, 1, 10, 5)])
def test_scan_equals_mambapy(sizes):
    u, step, A, B, C, first = tensors = inputs(*sizes)
    reset = torch.rand(sizes[:2]) < 0.2
    expected = selective_scan(*tensors, reset)
    y, last, _ = SelectiveScan.apply(u, step, A[None], B, C, first, (~reset).float(), True)
    assert_close((y, last), expected)
    assert_close(gradients(y, last, tensors), gradients(*expected, tensors))


@in_interpreter
def test_vmap_over_weights_and_inputs():
    each = [inputs(2, 6, 20, 16, seed) for seed in range(2)]
    stacked = [torch.stack([tensors[k].detach() for tensors in each]).requires_grad_() for k in range(6)]

    def scan(u, step, A, B, C, first):
        return SelectiveScan.apply(u, step, A[None], B, C, first, u.new_ones(2, 6), True)[:2]

    found = torch.func.vmap(scan)(*stacked)
    of_all = torch.autograd.grad(found[0].square().sum() + found[1].square().sum(), stacked)
    for k, tensors in enumerate(each):
        expected = selective_scan(*tensors, None)
        assert_close([x[k] for x in found], expected)
        alone = torch.autograd.grad(expected[0].square().sum() + expected[1].square().sum(), tensors)
        assert_close([x[k] for x in of_all], alone)
