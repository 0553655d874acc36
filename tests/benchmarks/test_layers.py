"""The benchmark of layers without a GPU: networks, comparison, resuming, and the page."""

import json

import pytest
import torch

from benchmarks import layers, layers_page, timing
from benchmarks.cases import FORWARD, MODES, TRAINING
from benchmarks.layer_cases import CPU, GPU, LayerCase, cases

SMALL = LayerCase("ppo", "lstm", 3, 5, 4)


def test_gpus_and_cpus_have_forty_networks_of_all_families():
    families = {"ppo", "world model", "time series", "speech", "language", "control"}
    for found in (GPU, CPU):
        assert len(found) == len({case.name for case in found}) >= 40
        assert {case.family for case in found} == families
        assert {case.cell for case in found} == {"lstm", "gru"}
        assert {case.num_layers for case in found} == {1, 2}
        assert any(case.bidirectional for case in found)
        assert any(case.reset for case in found)
    assert {case.precision for case in cases(gpu=True)} == {"float16", "bfloat16", "float32", "tf32"}


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"reset": True}], ids=str)
def test_both_networks_compute_the_same(cell, options):
    case = LayerCase("ppo", cell, 3, 40, 4, **options)
    networks, x = layers.network_pair(case, torch.float64, "cpu")
    ours, theirs = (run(x) for run, _ in networks.values())
    torch.testing.assert_close(ours, theirs)
    layers.check(case, networks, x)


def test_networks_with_different_results_are_an_error():
    networks, x = layers.network_pair(SMALL, torch.float32, "cpu")
    other = (lambda x: 1.1 * networks[layers.OURS][0](x), [])
    with pytest.raises(RuntimeError, match="outputs"):
        layers.check(SMALL, networks | {layers.OURS: other}, x)


def test_out_of_memory_is_a_result(monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")

    monkeypatch.setattr(layers, "network_pair", fail)
    assert layers.measured(SMALL, FORWARD, "cpu") == {"error": "CUDA out of memory"}


def test_tf32_is_set_only_in_its_context():
    def settings():
        return torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.rnn.fp32_precision

    before = settings()
    for allowed, precision in ((True, "tf32"), (False, "ieee")):
        with timing.tf32(allowed):
            assert settings() == (precision, precision)
    assert settings() == before
    assert {case.precision: case.dtype for case in cases(gpu=True)}["tf32"] == torch.float32


def test_interrupted_run_is_resumed(monkeypatch):
    monkeypatch.setattr(layers, "_SECONDS", 0.0)
    monkeypatch.setattr(layers, "cases", lambda gpu: [SMALL])
    known = vars(SMALL) | {"mode": MODES[0], "ms": {}, "ratio": 123.0}
    rows = list(layers.rows([], [known]))
    assert [row["mode"] for row in rows] == list(MODES)
    assert rows[0] == known
    assert rows[1]["ratio"] != 123.0


def test_page_contains_all_networks_and_ratios(monkeypatch, tmp_path):
    monkeypatch.setattr(layers, "_SECONDS", 0.0)
    monkeypatch.setattr(layers, "cases", lambda gpu: [SMALL, LayerCase("control", "gru", 1, 1, 4)])
    rows = list(layers.rows(["ppo-*"]))
    assert [row["mode"] for row in rows] == list(MODES)
    assert all(row["ratio"] == pytest.approx(row["ms"]["PyTorch"]["p50"] / row["ms"]["FlashRNN"]["p50"], abs=0.01)
               for row in rows)  # fmt: skip
    rows[0]["ratio"], rows[1]["ratio"] = 0.5, 2.0
    path = tmp_path / "layers.json"
    machine = {"gpu": None, "processor": "a processor", "threads": 2}
    path.write_text(
        json.dumps({"what": "What.", "machine": machine, "rows": [*rows, vars(SMALL) | {"mode": TRAINING}]})
    )
    page, figure = layers_page.write(path)
    text = page.read_text()
    assert f"| float32 | {FORWARD} | 1 | 0.50 | 0.50 (ppo: lstm, B = 3, T = 5, H = 4) | 1 |" in text
    assert f"| float32 | {TRAINING} | 1 | 2.00 |" in text
    assert figure.stat().st_size > 0
