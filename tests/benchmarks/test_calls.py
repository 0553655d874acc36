"""Benchmarks of host time, normalised cells and options, tested without a GPU."""

import pytest
import torch

from benchmarks import calls, normalised, options, ours, timing
from benchmarks.cases import FORWARD, MODES, TRAINING, Case, Job
from flashrnn import flashrnn


@pytest.mark.parametrize("training", [False, True])
def test_calls_return_h_or_all_gradients(training):
    found = calls.eager_calls(Case("lstm", 2, 4, 3, T=5, dtype="float32"), training, "cpu")
    assert list(found) == ["nn.LSTM", "flashrnn.FlashRNN", "flashrnn.Recurrence", "flashrnn.flashrnn"]
    results = {name: call() for name, call in found.items()}
    if training:
        assert [x.shape for x in results["flashrnn.flashrnn"]] == [(3, 5, 4, 2, 4), (4, 2, 4, 4), (4, 2, 4)]
        assert results["nn.LSTM"][0].shape == results["flashrnn.FlashRNN"][0].shape == (5, 3, 8)
    else:
        assert results["nn.LSTM"].shape == results["flashrnn.FlashRNN"].shape == (5, 3, 8)
        assert results["flashrnn.Recurrence"].shape == results["flashrnn.flashrnn"].shape == (3, 5, 2, 4)


def test_host_times_are_per_call_and_relative_to_the_peer(monkeypatch):
    seconds = {"nn.LSTM": 0.0075, "ours": 0.0025}  # for 50 calls
    monkeypatch.setattr(calls, "seconds", lambda call, number: seconds[call])
    monkeypatch.setattr(calls, "eager_calls", lambda case, training, device: {name: name for name in seconds})
    rows = list(calls.rows())
    assert [(row["N"], row["mode"], row["call"]) for row in rows[:4]] == [
        (12, FORWARD, "nn.LSTM"),
        (12, FORWARD, "ours"),
        (12, TRAINING, "nn.LSTM"),
        (12, TRAINING, "ours"),
    ]
    assert [row["us"]["p50"] for row in rows[:2]] == [150, 50]
    assert [row["over_nn_lstm"] for row in rows[:2]] == [1, 0.333]


class TestNormalised:
    def test_loop_equals_the_built_in_cell(self):
        inputs = timing.random_inputs(Case("layernorm_gru", 1, 6, 3, T=5).shapes(), torch.float64, "cpu")
        found = normalised.gru_loop(normalised.gru_step, *inputs)
        torch.testing.assert_close(found, flashrnn(*inputs, None, "layernorm_gru", "vanilla")[0])

    def test_rows_contain_ratios_to_the_compared_implementation(self, monkeypatch):
        def run(job, effort, backend):
            ms = 2.0 if job.case.function == "lstm" else 3.0
            return {"ms": {"p50": ms}, "call_ms": ms, "peak_mib": ms}

        monkeypatch.setattr(ours, "run", run)
        monkeypatch.setattr(
            normalised,
            "_loop",
            lambda case, mode: run(Job(Case("lstm", 1, 8, 3), mode), None, None) | {"call_ms": 24.0, "peak_mib": 0.0},
        )
        rows = list(normalised.rows(haste_sources=None))
        assert len(rows) == 2 * (len(normalised.LSTMS) + len(normalised.GRUS))
        assert {row["over"]["ms"] for row in rows if row["over_what"] == "lstm"} == {1.5}
        of_loop = [row["over"] for row in rows if row["function"] == "layernorm_gru"]
        assert of_loop == len(of_loop) * [{"ms": 1.5, "call_ms": 0.125, "peak_mib": None}]  # memory: reserved before


class TestOptions:
    def test_variants_are_compared_with_the_first_one_of_the_same_sizes(self, monkeypatch):
        def measured(variant, mode):
            ms = 2.0 if variant is options.GROUPS[0][0] else 3.0
            return {"ms": {"p50": ms}, "call_ms": 2 * ms, "peak_mib": 10 * ms}

        monkeypatch.setattr(options, "measured", measured)
        rows = list(options.rows())
        first = [row for row in rows if row["function"] == "lstm" and row["N"] == 12 and row["dtype"] == "bfloat16"]
        assert [row["variant"] for row in first if row["mode"] == FORWARD] == ["h alone", "return_states", "built in"]
        assert first[0]["over"] == {"ms": 1, "call_ms": 1, "peak_mib": 1}
        assert first[1]["over"] == {"ms": 1.5, "call_ms": 1.5, "peak_mib": 1.5}

    def test_variants_are_measured_in_their_modes(self, monkeypatch):
        asked = []
        row = {"ms": {"p50": 1}, "call_ms": 1, "peak_mib": 1}
        monkeypatch.setattr(options, "measured", lambda variant, mode: asked.append((variant, mode)) or row)
        list(options.rows())
        variants = [variant for group in options.GROUPS for variant in group]
        assert {*asked} == {(v, mode) for v in variants for mode in MODES if mode == TRAINING or not v.of_all}

    @pytest.mark.parametrize("of_all", [False, True])
    def test_gradients_come_from_h_or_from_all_states(self, of_all):
        case = Case("slstm", 2, 4, 3, T=5, dtype="float64")
        variant = options.Variant("a test", case, return_states=True, of_all=of_all)
        inputs = timing.random_inputs(case.shapes(), torch.float64, "cpu")
        found = options.outputs(variant, inputs)
        assert len(found) == (4 if of_all else 3)  # the states, or the batch of h
        gradients = timing.call_of(lambda: options.outputs(variant, inputs), inputs, True)()
        assert [x.shape for x in gradients] == [x.shape for x in inputs]

    def test_user_cell_equals_the_built_in_lstm(self):
        case = Case("lstm", 2, 4, 3, T=5, dtype="float64")
        inputs = timing.random_inputs(case.shapes(), torch.float64, "cpu")
        d_h = torch.randn(3, 5, 2, 4, dtype=torch.float64)
        built_in, own = (
            ours.results(Case(name, 2, 4, 3, 5, "float64"), TRAINING, inputs, d_h, "vanilla")
            for name in ("lstm", "benchmarks.options.OWN")
        )
        torch.testing.assert_close(own, built_in)

    def test_wrong_states_are_not_timed(self, monkeypatch):
        right = options.flashrnn

        def wrong(*inputs, backend, **more):
            h, last, states = right(*inputs, backend="vanilla", **more)
            return h, last, (h, *(1.1 * x for x in states[1:])) if backend == "wrong" else states

        monkeypatch.setattr(options, "flashrnn", wrong)
        case = Case("lstm", 2, 4, 3, T=5)
        assert options.check_states(case, "vanilla", "cpu").keys() == {"state 0", "state 1"}
        with pytest.raises(ArithmeticError, match=r"state 1 1\.0e-01 \(bound 1\.0e-02\)"):
            options.check_states(case, "wrong", "cpu")
