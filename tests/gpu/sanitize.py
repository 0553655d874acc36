"""Run small cases of the kernels under compute-sanitizer of CUDA's toolkit: `python -m tests.gpu.sanitize`.

It prints a line for each failed case with the file of the tool's output. The cases of a group (a backend, or the
kernels of decoding) share a process. If the tool reports an error, each case runs again in its own process, because a
process cannot use the GPU after the first error.
"""

import argparse
import itertools
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from flashrnn import FlashRNN, decoding, flashrnn, get_cell, products
from tests.cuda.decoding.test_step import random_model
from tests.problems import random_reset, results
from tests.suite import Case, inputs_for

TOOLS = ("memcheck", "racecheck", "synccheck")
BACKENDS = ("cuda_fused", "cuda")
DTYPES = (torch.bfloat16, torch.float32)
SIZES = (  # one block, clusters, grids
    Case(get_cell("lstm"), B=5, T=4, N=3, D=64),
    Case(get_cell("slstm"), B=9, T=4, N=1, D=128, reset=True),
    Case(get_cell("gru"), B=9, T=4, N=1, D=256),
    Case(get_cell("lstm"), B=9, T=4, N=1, D=256),
    Case(get_cell("lstm"), B=20, T=4, N=1, D=768),
    Case(get_cell("slstm"), B=9, T=4, N=1, D=768),
    Case(get_cell("lstm"), B=5, T=3, N=1, D=1024),
    Case(get_cell("layernorm_lstm"), B=5, T=4, N=3, D=64),
    Case(get_cell("layernorm_lstm"), B=9, T=4, N=1, D=256, reset=True),
    Case(get_cell("layernorm_gru"), B=9, T=4, N=1, D=1024),
    Case(get_cell("lstm"), B=8, T=130, N=2, D=128),  # d_R overlaps with the loop
    Case(get_cell("lstm"), B=5, T=4, N=2, D=63),  # heads are padded to an even size and truncated again
)
DECODING = "decoding"
DECODED = (  # T steps of a model with two blocks
    Case(get_cell("lstm"), B=3, T=2, N=2, D=32),
    Case(get_cell("slstm"), B=11, T=2, N=1, D=64),
    Case(get_cell("gru"), B=2, T=2, N=2, D=32),
    Case(get_cell("layernorm_lstm"), B=3, T=2, N=2, D=32),
    Case(get_cell("lstm"), B=20, T=2, N=2, D=32),  # batches above 8 are not supported in float32
    Case(get_cell("layernorm_gru"), B=33, T=1, N=1, D=64),
)
LAYERS = "layers"
LAYERED = (  # single steps, and sequences of different lengths
    Case(get_cell("lstm"), B=9, T=5, N=1, D=64),
    Case(get_cell("gru"), B=3, T=5, N=2, D=20),
)
GROUPS = (*BACKENDS, DECODING, LAYERS)
CASES = (
    *itertools.product(BACKENDS, SIZES, DTYPES),
    *itertools.product((DECODING,), DECODED, DTYPES),
    *itertools.product((LAYERS,), LAYERED, DTYPES),
)
_PRODUCT, _OF_ONE_HEAD = products._product, products._of_one_head


def sanitize(tool: str, group: str, folder: Path) -> list[str]:
    """Return the errors of a tool in a group of cases."""
    numbers = [number for number, case in enumerate(CASES) if case[0] == group]
    if _sanitize(tool, numbers, folder / f"{tool}-{group}.txt"):
        return []
    logs = {number: folder / f"{tool}-{'-'.join(map(str, CASES[number]))}.txt" for number in numbers}
    failed = [f"{tool}: {log}" for number, log in logs.items() if not _sanitize(tool, [number], log)]
    return failed or [f"{tool}, of all cases in one process: {folder / f'{tool}-{group}.txt'}"]


def _sanitize(tool: str, numbers: list[int], log: Path) -> bool:
    """Return whether the tool reports no error in these cases."""
    options = ["--tool", tool, "--kernel-name", "kns=flashrnn", "--report-api-errors", "no", "--error-exitcode", "1"]
    if tool == "synccheck":  # it expects fewer mbarriers than a cluster has
        options += ["--num-cuda-barriers", "8192"]
    command = [sys.executable, "-m", "tests.gpu.sanitize", "--numbers", *map(str, numbers)]
    with log.open("w") as file:
        done = subprocess.run(["compute-sanitizer", *options, *command], stdout=file, stderr=subprocess.STDOUT)
    return done.returncode == 0


def run(number: int) -> None:
    """Run a case on the GPU if the GPU supports it."""
    group, case, dtype = CASES[number]
    print(group, case, dtype, flush=True)
    device = torch.device("cuda:0")
    try:
        {DECODING: decode, LAYERS: run_layer}.get(group, partial(train, group))(case, dtype, device)
    except pytest.skip.Exception as reason:
        return print(f"not supported: {reason}", flush=True)
    torch.cuda.synchronize()


def train(backend: str, case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """Run the forward and backward pass of a backend."""
    inputs = inputs_for(backend, case, dtype, device)
    reset = random_reset(case.B, case.T).to(device) if case.reset else None
    with products_in_float32():
        results(flashrnn, inputs, function=case.cell, backend=backend, reset=reset)


def run_layer(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """Run a layer on single steps and on sequences of different lengths, with gradients and without."""
    size = case.N * case.D
    layer = FlashRNN(size, size, function=case.cell, num_heads=case.N, device=device, dtype=dtype)
    sequences = [torch.randn(1 + n % case.T, size, device=device, dtype=dtype) for n in range(case.B)]
    reset, states = torch.arange(case.B, device=device) % 2 == 0, None
    for with_gradients in (False, True):
        with torch.set_grad_enabled(with_gradients), products_in_float32(), inputs_in_float32():
            out, states = layer.step(torch.stack([one[0] for one in sequences]), states, reset)
            packed, _ = layer(pack_sequence(sequences, enforce_sorted=False))
            if with_gradients:
                (out.sum() + packed.data.sum()).backward()


def decode(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """Run steps of language models, `choose` and `add_norm`."""
    models = [random_model(case.cell, case.N, case.D, 2, case.B, dtype, int8=int8) for int8 in (False, True)]
    models = [placed(model, device) for model in models]
    reasons = [decoding.unsupported_reason(model) for model in models]
    if all(reasons):
        pytest.skip(reasons[0])
    for model in (model for model, reason in zip(models, reasons, strict=True) if reason is None):
        logits, keys = run_steps(model, case.T, device)
    settings = torch.tensor([1.0, 0.9, -5.0, 1.0], device=device)
    counter, chosen = torch.zeros(1, dtype=torch.int32, device=device), torch.empty_like(keys, dtype=torch.int64)
    decoding.choose(logits, chosen, counter, settings, top_k=5, keys=keys)
    x = model.embedding.clone()
    decoding.add_norm(x, model.embedding, model.norm, model.blocks[0].head_norm, case.D)


def run_steps(model: decoding.ResidualModel, steps: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Run steps with logits and steps with chosen tokens; return the last logits and the random keys."""
    batch, dtype = model.blocks[0].states.shape[1], model.embedding.dtype
    step, tokens = decoding.ModelStep(model), torch.zeros(batch, dtype=torch.int64, device=device)
    logits, chosen = torch.empty(batch, len(model.head), dtype=dtype, device=device), torch.empty_like(tokens)
    draw = {"keys": torch.arange(batch, dtype=torch.int32, device=device), "temperature": torch.ones(1, device=device)}
    for _ in range(steps):
        step(tokens, logits, chosen)
        step(tokens, chosen=chosen, **draw)
    return logits, draw["keys"]


def placed(model: decoding.ResidualModel, device: torch.device) -> decoding.ResidualModel:
    """Return the model on a device."""

    def of(weights: NamedTuple) -> NamedTuple:
        return weights._replace(
            **{name: x.to(device) for name, x in weights._asdict().items() if isinstance(x, Tensor)}
        )

    return of(model)._replace(blocks=[of(block) for block in model.blocks])


def products_in_float32() -> AbstractContextManager:
    """A context that computes d_R in float32.

    On an H200, racecheck fails in cuBLAS's kernels for half types, even if they are excluded.
    """
    return patch.multiple(products, _product=_product_in_float32, _of_one_head=_of_one_head_in_float32)


def inputs_in_float32() -> AbstractContextManager:
    """A context that computes input products in float32, for the same reason as `products_in_float32`."""

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return (x.float() @ self.weight.float().t()).to(x.dtype)

    return patch.object(nn.Linear, "forward", forward)


def _product_in_float32(d_gates: list[Tensor], steps: slice, h: Tensor, add_to: Tensor | None = None) -> Tensor:
    return _PRODUCT([x.float() for x in d_gates], steps, h.float(), add_to)


def _of_one_head_in_float32(d_Wx: Tensor, h: Tensor, initial: Tensor | None, few: bool) -> Tensor:
    return _OF_ONE_HEAD(d_Wx.float(), h.float(), initial, few).to(h.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sanitize", description=__doc__)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS, help="(default: all)")
    parser.add_argument("--out", type=Path, default=Path("outputs/sanitize"), help="(default: outputs/sanitize)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default: 1)")
    parser.add_argument("--numbers", nargs="+", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.numbers:
        for number in options.numbers:
            run(number)
        return
    if shutil.which("compute-sanitizer") is None:
        sys.exit("error: compute-sanitizer, which comes with CUDA's toolkit, is not on the PATH")
    options.out.mkdir(parents=True, exist_ok=True)
    asked = [(tool, group, options.out) for tool in options.tools for group in GROUPS]
    with ThreadPoolExecutor(options.jobs) as pool:
        failed = list(itertools.chain.from_iterable(pool.map(lambda job: sanitize(*job), asked)))
    print(*failed, f"{len(CASES)} cases by {', '.join(options.tools)}: {len(failed)} failed", sep="\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
