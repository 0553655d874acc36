"""Models that are trained together equal those of scripts.train with the same configs."""

import json

import pytest
import torch

from tests.tiny_runs import SHORT, TINY, config
from training.build import build
from training.fit import fit
from training.together import Batches, Ensemble, Learner, train_together

CPU = torch.device("cpu")


def tiny(folder, *overrides):
    return config(*TINY["parity"], *SHORT, "logger=none", f"run_dir={folder}", *overrides)


@pytest.mark.parametrize(
    "model", ["lstm", "mlstm", pytest.param("mamba2 model.mixer.head_dim=8", marks=pytest.mark.slow), "mamba"]
)
def test_models_equal_those_trained_alone(tmp_path, model):
    """On the CPU, vmap does not support the last one."""
    configs = [tiny(tmp_path, *f"model={model}".split(), f"optim.lr={lr}") for lr in (1e-3, 5e-3)]
    batches = Batches(configs[0], CPU)
    learners = [Learner(one, batches, CPU) for one in configs]
    ensemble = Ensemble(learners)
    while ensemble.left:
        ensemble.step()
    for learner, result in zip(learners, ensemble.evaluate(), strict=True):
        run = build(learner.config)
        fit(run, learner.config)
        for parameter, alone in zip(learner.model.parameters(), run.module.model.parameters(), strict=True):
            torch.testing.assert_close(parameter, alone, rtol=0, atol=1e-5)
        assert result == run.data.evaluate(run.trainer, run.module)
        of_training_lengths = {key: result[key] for key in ("task", "chance", "training_lengths", "in_distribution")}
        assert of_training_lengths in ensemble.evaluate(beyond=False)


def test_only_models_with_weights_that_are_not_finite_fail(tmp_path):
    settings = {"one": "optim.lr=1e-3", "two blocks": "model.num_blocks=2", "too fast": "optim.lr=1e38"}
    runs = {tmp_path / name: tiny(tmp_path / name, "model=elman", setting) for name, setting in settings.items()}
    for folder in runs:
        folder.mkdir()
    failed = train_together(runs, CPU)
    assert list(failed) == [tmp_path / "too fast"]
    assert "not finite" in failed[tmp_path / "too fast"]
    assert json.loads((tmp_path / "two blocks" / "eval.json").read_text())["step"] == 8
