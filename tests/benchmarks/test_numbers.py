"""Numbers that benchmarks derive from times and bytes, compared with results by hand."""

from types import SimpleNamespace

import pytest
import torch
from matplotlib.figure import Figure

from benchmarks import attention, cpu_fused, figures, language_model, reference_cpu, timing
from benchmarks.cases import FORWARD, Case, Job
from benchmarks.floors import forward_floor

ELEVEN = (900, 40, 10, 60, 5, 30, 80, 20, 95, 50, 70)  # p20, p50 and p80 of 11 times are the third, sixth and ninth
JOB = Job(Case("lstm", 12, 64, 16), FORWARD)


def spread(ms):
    return {"p20": ms / 2, "p50": ms, "p80": 2 * ms}


class TestKernels:
    def test_quantiles_of_unsorted_times(self):
        assert timing.quantiles(ELEVEN) == {"p20": 20, "p50": 50, "p80": 80}

    def test_time_of_a_call_is_the_mean_of_many(self, monkeypatch):
        monkeypatch.setattr(timing, "seconds", lambda run, calls: {1: 0.002, 50: 0.05}[calls])
        assert timing._call_ms(None, 100) == 1

    @pytest.mark.parametrize(("call_ms", "repetitions"), [(8, 50), (1000, 5)])
    def test_calls_are_repeated_for_a_duration_but_at_least_five_times(self, call_ms, repetitions, monkeypatch):
        asked = []
        monkeypatch.setattr(timing, "_call_ms", lambda run, ms: call_ms)
        monkeypatch.setattr(timing, "device_ms", lambda run, repetitions: asked.append(repetitions) or [1.0, 1.0])
        monkeypatch.setattr(timing, "_peak_mib", lambda run: 0)
        timing.measure(lambda: None, [], False, timing.FULL)
        assert asked == [repetitions]

    def test_host_time_is_the_smallest_of_several_calls(self, monkeypatch):
        clock = iter([0, 1, 1, 3, 3, 10, 10, 12, 12, 14])
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
        assert timing._host_seconds(lambda: None) == 1

    def test_peak_memory_excludes_earlier_allocations(self, monkeypatch):
        mib = {"synchronize": 0, "reset_peak_memory_stats": 0, "memory_allocated": 3, "max_memory_allocated": 10}
        for name, value in mib.items():
            monkeypatch.setattr(torch.cuda, name, lambda value=value: value * 1_048_576)
        assert timing._peak_mib(lambda: None) == 7

    @pytest.mark.parametrize(("N", "D", "us"), [(4, 192, 0.17), (3, 256, 0.54), (1, 512, 0.54), (1, 768, 0.61)])
    def test_floor_of_small_batches_depends_on_the_blocks_of_a_head(self, N, D, us):
        assert forward_floor(Case("lstm", N, D, 16)) == us

    def test_floor_of_large_batches_depends_on_the_bytes(self):
        # 335 000 units with four inputs and h of two bytes each are 3.35 MB, which take 1 µs at 3.35 TB/s.
        assert forward_floor(Case("lstm", 10, 100, 335)) == 1

    def test_curves_have_microseconds_per_step(self):
        axes = Figure().subplots()
        figures._curves(axes, {JOB: {"ours": {"ms": spread(0.512)}}}, "B")
        assert axes.lines[0].get_ydata() == [0.5]

    def test_floor_is_labelled_with_its_fraction_of_our_time(self):
        axes = Figure().subplots()
        figures._floor(axes, {JOB: {"ours": {"ms": spread(0.69632)}}}, "B")  # 0.68 µs per step; the floor is 0.17
        assert axes.texts[0].get_text() == "25%"

    def test_ratios_are_their_time_over_ours(self):
        figure = figures._ratios({JOB: {"ours": {"ms": spread(2)}, "cudnn_fp16": {"ms": spread(8)}}})
        assert figure.axes[0].patches[0].get_width() == 4


class TestLanguageModels:
    def test_training_step_has_median_and_quantiles(self):
        found = language_model._speed(ELEVEN, batch_size=1, devices=1, accumulate=1)
        assert (found["p20_ms"], found["ms"], found["p80_ms"]) == (20, 50, 80)

    def test_tokens_per_second_include_all_devices_and_batches(self):
        # 3 batches of 4 sequences of 1024 tokens on 2 devices are 24 576 tokens, in 50 ms.
        found = language_model._speed((50, 50), batch_size=4, devices=2, accumulate=3)
        assert found["tokens_per_s"] == 491_520

    def test_training_steps_are_compared_with_the_transformer_of_the_same_batch_size(self, monkeypatch):
        ms = {"model=gru": 120, "model=transformer": 80, "model=lstm": 100}

        def measured(overrides, batch_size, devices, accumulate):
            too_large = overrides == ["model=transformer"] and batch_size == 32
            return {"error": "out of memory"} if too_large else {"ms": ms[overrides[0]], "p20_ms": 1}

        monkeypatch.delenv("WORLD_SIZE", raising=False)
        monkeypatch.setattr(language_model, "_measure", measured)
        rows = list(language_model.rows(list(ms), [16, 32], [1]))
        assert [row.get("over_transformer") for row in rows] == [None, 1, 1.25, None, None, None]
        monkeypatch.setattr(language_model, "_measure", lambda *_: {"ms": 40})
        known = [row | {"attention_ms": {"cudnn": 80}} for row in rows[:2]]
        again = language_model.rows(list(ms), [16], [1], known)
        assert [(row["ms"], row.get("over_transformer")) for row in again] == [(120, None), (80, 1), (40, 0.5)]


class TestProcessors:
    def test_times_are_those_of_calls_in_turns_after_the_warmup(self):
        clock = (s for ms in (1, 1, *ELEVEN) for s in (0, ms / 1000, 0, 2 * ms / 1000))
        functions = {"ours": lambda: None, "peer": lambda: None}
        found = reference_cpu.processor_time(functions, rounds=11, warmup=2, clock=clock.__next__)
        assert found == {"ours": {"p20": 20, "p50": 50, "p80": 80}, "peer": {"p20": 40, "p50": 100, "p80": 160}}

    def test_reference_is_compared_with_the_median_of_autograd(self, monkeypatch):
        ms = {"autograd": spread(6), "reference": spread(2)}
        monkeypatch.setattr(reference_cpu, "processor_time", lambda functions: ms)
        assert reference_cpu._reference_row("lstm", 2, 3, 2, 4)["speedup"] == 3

    def test_saved_memory_counts_each_tensor_once(self):
        x = torch.ones(1000, requires_grad=True)
        assert reference_cpu._saved_bytes(lambda: (x * x).exp()) == 8000  # x, saved twice, and the result

    def test_saved_memory_is_in_megabytes(self, monkeypatch):
        monkeypatch.setattr(reference_cpu, "processor_time", lambda functions: dict.fromkeys(functions, spread(1)))
        monkeypatch.setattr(reference_cpu, "_saved_bytes", lambda forward: 2_500_000)
        assert reference_cpu._reference_row("lstm", 2, 3, 2, 4)["kept_mb"] == {"autograd": 2.5, "reference": 2.5}

    def test_backend_is_compared_with_the_median_of_each_peer(self, monkeypatch):
        ms, run = {"cpu_fused": spread(2), "vanilla": spread(6), "nn.LSTM": spread(1)}, cpu_fused.flashrnn
        monkeypatch.setattr(
            cpu_fused, "flashrnn", lambda *inputs, function, backend: run(*inputs, function=function, backend="vanilla")
        )
        monkeypatch.setattr(cpu_fused, "processor_time", lambda functions, **options: ms)
        assert cpu_fused._row("lstm", 2, 3, 1, 4, None)["speedup"] == {"vanilla": 3, "nn.LSTM": 0.5}


def test_attention_row_is_that_of_the_fastest_kernel(monkeypatch):
    monkeypatch.setattr(attention.torch, "randn", lambda *shape, **options: torch.ones(shape))

    def measured(forward, qkv, training, effort):
        if torch.backends.cuda.mem_efficient_sdp_enabled():
            raise RuntimeError("No available kernel. Aborting execution.")
        return {"ms": spread(2.0 if torch.backends.cuda.flash_sdp_enabled() else 1.0)}

    monkeypatch.setattr(attention, "measure", measured)
    row = attention.run(Job(Case("lstm", 2, 16, 1, 4), FORWARD), None)
    assert (row["kernel"], row["kernels_ms"]) == ("cudnn", {"flash_2": 2.0, "cudnn": 1.0})
    monkeypatch.setattr(attention, "measure", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        attention.run(JOB, None)


def test_names_of_attention_operators_are_recorded():
    q = torch.randn(1, 2, 8, 16, requires_grad=True)

    def call():
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()

    assert attention.operators(call) == ["flash"]
    assert attention.operators(lambda: q.sum()) == []
