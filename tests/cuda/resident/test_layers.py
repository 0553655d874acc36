"""Concurrent layers: results of their kernels on the processor, when they are used, and their binaries."""

import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from flashrnn import FlashRNN, concurrent_layers, cuda_layer, get_cell
from flashrnn.cuda.arguments import Argument
from flashrnn.cuda.parameters import Parameter, Parameters
from flashrnn.cuda.resident import backend, calls, input_product, layers, resources
from flashrnn.cuda.resident.input_product import ProductTiling
from flashrnn.cuda.resident.kernel import SPILLED, compile_best
from flashrnn.cuda.resident.parameters import fused
from flashrnn.cuda.resident.source import LAYER_CHUNKS, prelude
from flashrnn.cuda.resident.tiling import Tiling
from flashrnn.cuda.spec import KernelSpec, Variant
from flashrnn.gpu import named_gpu
from flashrnn.problem import Problem
from tests.cuda.host_kernel import HostKernel, compile_for_host
from tests.cuda.resident.test_fused_on_host import on_host, tiled  # noqa: F401
from tests.tolerances import assert_close

LSTM = get_cell("lstm")

# A thread that writes the chunks of a kernel's input one by one, and reads its results as soon as all blocks have
# signalled them.
NEIGHBOURS = """
void between_neighbours(const scalar* given, PARAMETERS) {
  const Params params{PARAMETER_NAMES};
  Thread both;
  const bool first = blockIdx.x == 0 && threadIdx.x == 0;
  if (first)
    start(both, [=] {
      const i64 B = params.B, T = params.T, row_t = params.row_t;
      u32 sum = 0;
      auto each_row = [&](int chunk, auto act) {
        for (int step = chunk * LAYER_CHUNK; step < T && step < (chunk + 1) * LAYER_CHUNK; step++)
          for (i64 b = 0; b < B; b++) act(b * (row_t == 1 ? T : 1) + (BACKWARDS ? T - 1 - step : step) * row_t);
      };
      auto read = [&](int chunk) {
        await(params.done + chunk, COUNTED);
        each_row(chunk, [&](i64 row) {
          for (i64 i = 0; i < WRITES; i++) sum += params.OUTPUT[row * WRITES + i].bits;
        });
      };
      int chunk = 0;
      for (; chunk * LAYER_CHUNK < T; chunk++) {
        each_row(chunk, [&](i64 row) {
          std::copy_n(given + row * READS, READS, const_cast<scalar*>(params.INPUT) + row * READS);
        });
        signal(const_cast<u32*>(params.arrived + chunk));
        if (chunk > 0) read(chunk - 1);
      }
      read(chunk - 1);
      CHECK(sum > 0);
    });
  KERNEL(PARAMETER_NAMES);
  if (first) join(both);
}
"""
NAMES = {  # by kernel: the name and the row size of its input, and of its results
    "forward": ("x", "GI * ROW", "h", "ROW"),
    "backward": ("d_h", "ROW", "d_x", "GI * ROW"),
    "input_product": ("rows", "K", "product", "WIDTH"),
}


@dataclass(frozen=True)
class BetweenNeighbours(HostKernel):
    """A kernel whose input is written, and whose results are read, by a concurrent thread."""

    input: str = ""
    counts: int = 1  # signals of a block per chunk
    chunk: int = 0  # steps per chunk

    def launch(self, groups: int, by_name: Mapping[str, Argument]) -> None:
        x, chunks = by_name[self.input], torch.zeros(2, 100, dtype=torch.int32)
        given = x.clone()
        x.fill_(torch.nan)
        between = {"given": given, "arrived": chunks[0], "producers": 1, "done": chunks[1]}
        super().launch(groups, {**by_name, **between})
        counted = -(-by_name["T"] // self.chunk)
        assert chunks[1].tolist() == [groups * self.blocks * self.counts] * counted + [0] * (100 - counted)


def between_neighbours(
    kind: str, text: str, own: Parameters, *sizes: int, backwards: bool, counts: int = 1
) -> HostKernel:
    """Return the kernel flashrnn_<kind> of resident/kernels/<kind>.cuh, whose blocks signal a chunk `counts` times.

    `sizes` are blocks, threads and bytes of shared memory.
    """
    name, reads, output, writes = NAMES[kind]
    of_kind = {
        "INPUT": name,
        "READS": reads,
        "OUTPUT": output,
        "WRITES": writes,
        "BACKWARDS": str(int(backwards)),
        "COUNTED": str(sizes[0] * counts),
        "KERNEL": f"flashrnn_{kind}",
    }
    thread = re.sub(r"\b[A-Z]+\b", lambda word: of_kind.get(word[0], word[0]), NEIGHBOURS)
    chunk = LAYER_CHUNKS["backward" if backwards else "forward"]
    library = compile_for_host("between_neighbours", text, f"resident/kernels/{kind}.cuh", thread)
    given = Parameter("given", "const scalar*", torch.bfloat16)
    return BetweenNeighbours(library, (given, *own), *sizes, input=name, counts=counts, chunk=chunk)


@pytest.fixture
def overlapped(on_host, monkeypatch):  # noqa: F811
    """Return a function that lets concurrent layers run on the processor with these tilings.

    It returns a list of the input names of the kernels that have run.
    """
    launched, run = [], BetweenNeighbours.launch

    def use(tilings: dict[str, Tiling], products: dict[str, ProductTiling]) -> list[str]:
        on_host(tilings)

        def loop(choose, spec, device, dependent):
            assert spec.layers > 1
            chosen = tilings[spec.direction]
            shared = resources.shared_bytes(spec, chosen)
            text, sizes = prelude(spec, chosen, shared), (chosen.blocks, chosen.threads, shared)
            of_kind = {
                "backwards": spec.direction == "backward",
                "counts": 1 if spec.direction == "backward" else chosen.unit_tiles,
            }
            return between_neighbours(spec.direction, text, fused(spec), *sizes, **of_kind), chosen

        def product(spec, tiling, cluster, device):
            text, shared = input_product.prelude(spec.dtype, tiling), tiling.shared_bytes
            sizes = cluster, input_product.THREADS, shared
            own = input_product.parameters(spec.dtype)
            return between_neighbours("input_product", text, own, *sizes, backwards=tiling.backward)

        monkeypatch.setattr(backend, "_kernel", cache(loop))
        monkeypatch.setattr(layers, "product_kernel", cache(product))
        monkeypatch.setattr(layers, "_product_tiling", lambda alone, *_: products[alone.direction])
        return launched

    monkeypatch.setattr(
        BetweenNeighbours, "launch", lambda self, *given: launched.append(self.input) or run(self, *given)
    )
    monkeypatch.setattr(calls, "zeros", lambda device, size: torch.zeros(size, dtype=torch.uint8))
    monkeypatch.setattr(layers, "meanwhile", lambda *_: nullcontext())
    monkeypatch.setattr(layers, "device_gpu", lambda index: named_gpu("H100"))
    monkeypatch.setattr(cuda_layer, "on_gpu", lambda x: True)
    monkeypatch.setattr(
        concurrent_layers, "joined_states", torch.cat
    )  # not an address, which is invalid in another process
    for cached in (cuda_layer._forward, concurrent_layers._overlapped):
        cached.cache_clear()
    yield use
    for cached in (cuda_layer._forward, concurrent_layers._overlapped):
        cached.cache_clear()


ONE_BLOCK = {"forward": tiled(2, 1, 1, 8, 1, stages=6), "backward": tiled(2, 1, 1, 8, 1)}
CLUSTER = {"forward": tiled(1, 1, 1, 4, 2), "backward": tiled(1, 2, 1, 4, 2, stages=2, register_fragments=0)}


def products(gates: int, H: int, columns: int, rows: int) -> dict[str, ProductTiling]:
    return {
        "forward": ProductTiling(H, gates * H, columns, rows),
        "backward": ProductTiling(gates * H, H, columns, rows, backward=True),
    }


@pytest.mark.parametrize(
    ("batch", "steps", "features", "options", "tilings", "products"),
    [
        (3, 19, 32, {"hidden_size": 32, "num_layers": 3}, ONE_BLOCK, products(4, 32, 32, 128)),
        (
            3,
            19,
            32,
            {"hidden_size": 32, "num_layers": 2, "function": "layernorm_lstm"},
            ONE_BLOCK,
            products(4, 32, 32, 128),
        ),
        pytest.param(
            5,
            33,
            64,
            {"hidden_size": 64, "num_heads": 2, "num_layers": 2, "batch_first": True, "function": "gru"},
            CLUSTER,
            products(3, 64, 64, 128),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            9,
            48,
            6,
            {"hidden_size": 72, "num_layers": 2, "function": "elman", "bias": False},
            {"forward": tiled(5, 1, 1, 8, 1), "backward": tiled(5, 1, 1, 8, 1)},
            products(1, 72, 128, 64),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["one block", "one block, normalised", "clusters", "no whole tiles"],
)
def test_concurrent_layers_equal_the_reference(overlapped, batch, steps, features, options, tilings, products):
    launched = overlapped(tilings, products)
    torch.manual_seed(0)
    network = FlashRNN(features, dtype=torch.bfloat16, **options)
    shape = (batch, steps) if network.batch_first else (steps, batch)
    x = torch.randn(*shape, features, dtype=torch.bfloat16)
    states = torch.randn(len(network.cell.states), network.num_layers, batch, network.hidden_size).bfloat16().float()

    def results(dtype: torch.dtype, backend: str) -> dict[str, torch.Tensor]:
        of = FlashRNN(features, backend=backend, dtype=dtype, **options)
        of.load_state_dict(network.state_dict())
        given, before = x.to(dtype).requires_grad_(), tuple(states) if len(states) > 1 else states[0]
        with torch.no_grad():
            alone, _ = of(given, before)
        out, last = of(given, before)
        last = last if isinstance(last, tuple) else (last,)
        loss = out.double().sin().sum() + sum((i + 2) * state.double().square().sum() for i, state in enumerate(last))
        names = ["x", *(name for name, _ in of.named_parameters())]
        gradients = torch.autograd.grad(loss, [given, *of.parameters()])
        values = [alone, out, *last, *gradients]
        return dict(zip(["alone", "out", *(f"last {i}" for i in range(len(last))), *names], values, strict=True))

    found = results(torch.bfloat16, "cuda_fused")
    loops, has_last = network.num_layers, features == network.hidden_size  # the product with x follows the loops
    ran = {kind: launched.count(kind) for kind in ("x", "d_h", "rows")}
    assert ran == {"x": 2 * loops, "d_h": loops, "rows": 3 * (loops - 1) + has_last}
    assert_close(found, results(torch.float64, "vanilla"), torch.bfloat16, results(torch.bfloat16, "vanilla"))


@pytest.mark.parametrize(
    ("head_dim", "batch", "number", "faster"),
    [
        (512, 16, 2, True),
        (512, 16, 4, True),
        (512, 16, 12, False),  # too many blocks
        (512, 64, 2, False),
        (256, 16, 4, True),
        (1024, 16, 2, False),  # needs grids
        (64, 1, 2, True),
    ],
)
def test_concurrent_layers_are_faster_if_they_fit_on_the_gpu(head_dim, batch, number, faster):
    problem = Problem(LSTM, 1, head_dim, torch.bfloat16, torch.device("cuda"), True, False, named_gpu("H100"))
    assert layers.are_faster(problem, batch, number, "auto") is faster
    assert not layers.are_faster(problem, batch, number, "cuda")
    assert not layers.are_faster(problem._replace(dtype=torch.float32), batch, number, "auto")
    assert not layers.are_faster(problem._replace(assumed_gpu=named_gpu("A100")), batch, number, "auto")


def test_explain_mentions_concurrent_layers(monkeypatch):
    monkeypatch.setattr(layers, "are_faster", lambda *_: True)
    network = FlashRNN(8, 64, num_layers=2, dropout=0.1, device="meta")
    assert "layers at the same time" in network.explain(16, torch.bfloat16, training=False)
    assert "layers at the same time" not in network.explain(16, torch.bfloat16)
    assert "layers at the same time" not in network.explain(16, torch.bfloat16, training=False, reset=True)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("cell", "head_dim", "number"),
    [("lstm", 128, 4), ("lstm", 256, 4), ("lstm", 512, 2), ("lstm", 512, 4), ("layernorm_lstm", 64, 6)],
)
def test_no_register_spills_in_the_loops(cell, head_dim, number, direction):
    variant = Variant(aux=torch.float16, training=True)
    alone = KernelSpec(direction, get_cell(cell), 1, head_dim, 16, torch.bfloat16, named_gpu("H100"), variant)
    product = layers._product_tiling(alone, number, 512)
    assert input_product.compile_product(alone, product).spilled == 0
    spec = replace(alone, layers=number, product_blocks=product.blocks)
    assert compile_best(spec)[0].spilled <= SPILLED
