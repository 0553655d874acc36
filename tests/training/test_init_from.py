"""Training that starts from the weights of another run."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from scripts.train import train
from training import checkpoint
from training.build import build
from training.export import export


def weights(path):
    return checkpoint.load(checkpoint.find(str(path)))["state_dict"]


@pytest.mark.parametrize("exported", [False, True])
def test_training_starts_with_weights_and_tokenizer_of_the_run(trained, exported, tiny_config, tmp_path, change_texts):
    before = trained[0].run_dir
    start = str(export(before, tmp_path / "out")) if exported else before
    change_texts()  # a tokenizer trained on them would differ
    config = tiny_config("text_tiny", f"init_from={start}", run="after")
    run = build(config)
    assert all(torch.equal(run.module.state_dict()[name], weight) for name, weight in weights(before).items())
    train(config)
    kept = (tmp_path / "outputs/text_tiny/after/tokenizer/tokenizer.json").read_text()
    assert kept == Path(before, "tokenizer", "tokenizer.json").read_text()
    assert any(not torch.equal(weights(before)[name], weight) for name, weight in weights(config.run_dir).items())


def test_resuming_an_export_is_an_error(trained, tiny_config, tmp_path):
    start = export(trained[0].run_dir, tmp_path / "out")
    with pytest.raises(ValueError, match=r"ckpt_path=.*out.* init_from="):
        train(tiny_config("text_tiny", f"ckpt_path={start}", "trainer.max_steps=20", run="after"))


def test_resumed_run_keeps_its_own_weights(trained, tiny_config, tmp_path):
    before = shutil.copytree(trained[0].run_dir, tmp_path / "before")
    config = tiny_config("text_tiny", f"init_from={before}", run="after")
    train(config)
    shutil.rmtree(before)  # not needed again
    again = ["trainer.max_steps=9", f"ckpt_path={config.run_dir}", f"init_from={before}"]
    assert train(tiny_config("text_tiny", *again, run="again"))["perplexity"] > 0


def test_other_file_is_an_error_before_the_data_are_prepared(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr("data.text.Text.prepare_data", None)
    (tmp_path / "other.ckpt").write_text("x")
    with pytest.raises(ValueError, match=r"other\.ckpt is damaged or no checkpoint"):
        build(tiny_config("text_tiny", f"init_from={tmp_path / 'other.ckpt'}", run="after"))


def test_error_names_weights_of_wrong_shape(trained, tiny_config):
    start = f"init_from={trained[0].run_dir}"
    config = tiny_config("text_tiny", start, "model.num_blocks=2", "model.num_heads=2", run="after")
    with pytest.raises(ValueError, match="init_from") as error:
        build(config)
    assert re.search(r"blocks\.0\.mixer\.recurrence\.R: \[4, 1, 8, 8\].*\[4, 2, 4, 4\]", str(error.value))
    assert re.search(r"blocks\.1\.mixer\.gates\.weight: None .*\[32, 8\]", str(error.value))
