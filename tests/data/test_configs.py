from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

CONFIGS = Path(__file__).parents[2] / "configs" / "data"


def load(name, **overrides):
    with initialize_config_dir(str(CONFIGS.parent), version_base="1.3"):
        config = compose("train", [f"data={name}"]).data
    return OmegaConf.merge(config, {"seed": 3, **overrides})


ASKED_FOR = {  # required keys without a default
    "text": {"source": "stdlib"},
    "mix": {"sources": {"a": {"source": "stdlib", "weight": 1}}},
    "instructions": {"source": __file__},
}


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_config_builds_its_datamodule(name):
    assert instantiate(load(name, **ASKED_FOR.get(name, {}))).seed == 3


def test_parity_trains_up_to_40_and_evaluates_up_to_256():
    module = instantiate(load("parity"))
    assert next(iter(module.train_dataloader()))["input_ids"].shape == (128, 40)
    assert module.eval_ranges == [(40, 63), (64, 127), (128, 256)]


def test_text_tiny_needs_no_download(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: pytest.fail("asked the hub"))
    module = instantiate(load("text_tiny", cache_dir=str(tmp_path), max_bytes=500_000))
    module.prepare_data()
    module.setup()
    assert module.vocab_size == 2048
    assert next(iter(module.train_dataloader()))["input_ids"].shape == (16, 128)
    assert len(module.val_data) > 10
    assert 100 < module.unigram_perplexity() < 2048
