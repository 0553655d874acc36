"""Models with layer-normalised cells can be trained, evaluated, exported and used for generation."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from scripts.train import train
from training.export import export


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["layernorm_lstm", "layernorm_gru"])
def test_model_learns_parity(tiny_config, cell):
    """In a hundred steps on short sequences."""
    longer = ["model.d_model=32", "data.batch_size=64", "trainer.max_steps=100", "optim.lr=0.01", "val_every=100"]
    result = train(tiny_config("parity", f"model={cell}", *longer))
    assert [part["accuracy"] > 0.9 for part in result["ranges"]] == [True, True]


@pytest.mark.parametrize("cell", [pytest.param("layernorm_lstm", marks=pytest.mark.slow), "layernorm_gru"])
def test_exported_model_generates_text(tiny_config, tmp_path, cell):
    config = tiny_config("text_tiny", f"model={cell}")
    train(config)
    export(config.run_dir, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    options = {"max_new_tokens": 6, "do_sample": False}
    ids = torch.arange(5, 13).view(2, 4)
    assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))
