"""Reports during training: speed, data waits, samples."""

import time
from pathlib import Path

import pytest

from data import state_tracking
from scripts.train import train
from tests.tiny_runs import metrics
from training.peaks import peak_flops


def logged(folder, name):
    return [float(row[f"train/{name}"]) for row in metrics(Path(folder)) if row[f"train/{name}"]]


def test_speed_is_logged(tiny_config):
    config = tiny_config("parity", "global_batch_size=12", "trainer.log_every_n_steps=2")
    train(config)
    times, speeds = logged(config.run_dir, "step_time"), logged(config.run_dir, "tokens_per_second")
    assert len(times) == 4
    assert [time * speed for time, speed in zip(times, speeds, strict=True)] == pytest.approx([12 * 6] * 4)


@pytest.mark.parametrize(("slow", "wait"), [("training", 0.2), ("validation", 0.5)])
def test_waiting_for_data_is_reported(tiny_config, monkeypatch, slow, wait):
    """Validation counts neither as a wait nor as a part of a step."""
    width = {"training": 6, "validation": 12}[slow]

    class Slow(state_tracking.TaskSamples):
        def __getitem__(self, indices):
            time.sleep(wait * (self.max_length == width))
            return super().__getitem__(indices)

    monkeypatch.setattr(state_tracking, "TaskSamples", Slow)
    config = tiny_config("parity", "trainer.max_steps=4", "val_every=1")
    train(config)
    waits = [
        share * step
        for share, step in zip(*(logged(config.run_dir, n) for n in ("data_wait", "step_time")), strict=True)
    ]
    if slow == "training":
        assert min(waits[1:]) >= wait
    else:
        assert max(logged(config.run_dir, "step_time")[1:]) < wait  # the first step compiles the cell


def test_samples_are_written_after_validation(tiny_config):
    config = tiny_config("text_tiny", "samples=true", "trainer.num_sanity_val_steps=1")  # without samples
    train(config)
    text = (Path(config.run_dir) / "samples.txt").read_text()
    assert text.count("--- step 4\n") == text.count("--- step 8\n") == 3
    continuations = [part.partition("|")[2] for part in text.split("--- step ")[1:4]]
    assert len(set(continuations)) == 3  # equal random numbers would give equal samples of an untrained model


@pytest.mark.parametrize(
    ("device", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_peaks_of_known_gpus(device, tera):
    assert peak_flops(device) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize("device", ["NVIDIA A1000", "AMD Instinct MI300X", "Tesla T4"])
def test_peaks_of_unknown_gpus(device):
    assert peak_flops(device) is None
