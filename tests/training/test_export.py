"""Export of a run to a folder for transformers and scripts.evaluate."""

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.text import Text
from scripts.train import train
from tests.tiny_runs import evaluate
from training import checkpoint, model_card
from training.export import export
from training.lightning_module import TrainingModule


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    """Return the folder and the result of a copy of a tiny run, and its config, in the working folder of the run."""
    config, result = trained
    monkeypatch.chdir(Path(config.run_dir).parents[2])
    others = shutil.ignore_patterns("evaluate_*")  # evaluations by other tests
    return shutil.copytree(config.run_dir, tmp_path / "run", ignore=others), result, config


def test_exported_logits_and_tokenizer_equal_the_run(tiny_config, tmp_path):
    config = tiny_config("text_tiny", "model=hybrid", "model.num_blocks=2", "model.pattern=[slstm,window]")
    train(config)
    export(config.run_dir, tmp_path / "out")
    trained = TrainingModule(instantiate(config.model))
    trained.load_state_dict(checkpoint.load(checkpoint.find(config.run_dir))["state_dict"])
    ids = torch.arange(12).view(2, 6)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded(ids).logits, trained.eval().model(ids))

    datamodule: Text = instantiate(config.data)
    datamodule.setup()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "the 12th of forty texts"
    assert tokenizer(text)["input_ids"] == datamodule.tokenizer(text)["input_ids"]
    assert (tokenizer.padding_side, tokenizer.pad_token) == ("left", tokenizer.eos_token)
    assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id


def test_exported_model_has_the_evaluation_of_the_run(trained, tmp_path, monkeypatch):
    config, result = trained
    export(config.run_dir, tmp_path / "out")
    monkeypatch.chdir(Path(config.run_dir).parents[2])
    assert evaluate(str(tmp_path / "out"))["perplexity"] == pytest.approx(result["perplexity"])
    assert len(list(Path("corpora").glob("*/"))) == 1


def test_exported_tokenizer_does_not_depend_on_the_corpus(tiny_config, change_texts, tmp_path):
    config = tiny_config("text_tiny")
    train(config)
    export(config.run_dir, tmp_path / "before")
    change_texts()
    export(config.run_dir, tmp_path / "out")
    saved = (tmp_path / "out/tokenizer.json").read_text()
    assert saved == (tmp_path / "before/tokenizer.json").read_text()
    evaluate(str(tmp_path / "out"), "data.cache_dir=other")
    (used,) = (tmp_path / "other").glob("*/tokenizer/tokenizer.json")
    assert used.read_text() == saved


def test_full_disk_leaves_no_partial_export(trained, tmp_path):
    folder = trained[0].run_dir
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"out=.*/out .*\(.*\)"):
            export(folder, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "out").exists()


def test_model_card_describes_the_model(trained, tmp_path):
    config, result = trained
    export(config.run_dir, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| validation perplexity on {config.data.source} | {result['perplexity']:.2f} |" in card
    for row in ("mixer | lstm", "width | 8", "heads | 1", "tokenizer | bpe:300", "optimizer steps | 8"):
        assert f"| {row} |" in card
    commit = json.loads(Path(config.run_dir, "eval.json").read_text())["environment"]["commit"]
    assert f"| commit of the evaluation | {commit} |" in card
    assert str(tmp_path / "out") not in card.partition("## Configuration")[0]  # the path exists only on this machine
    model_card.write(tmp_path, json.loads((tmp_path / "out" / "training.json").read_text()), 5, ["my_cells.CELL"])
    assert "```python\nimport my_cells  # " in (tmp_path / "README.md").read_text()


def test_model_card_contains_the_evaluation_of_the_run(run, tmp_path):
    """A later evaluation may have used only a part of the data."""
    folder, result, config = run
    evaluate(str(folder), "trainer.limit_val_batches=1", "data.batch_size=1")
    export(folder, tmp_path / "out")
    expected = f"| validation perplexity on {config.data.source} | {result['perplexity']:.2f} |"
    assert expected in (tmp_path / "out" / "README.md").read_text()


def test_model_card_omits_results_of_another_step(run, tmp_path):
    folder, _, _ = run
    file = Path(folder, "eval.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"step": 4}))
    export(folder, tmp_path / "out")
    assert "Not evaluated" in (tmp_path / "out" / "README.md").read_text()


def test_export_of_a_state_tracking_model_is_an_error(trained_parity, tmp_path):
    with pytest.raises(ValueError, match=r"data\.state_tracking\.StateTracking.* tokenizer"):
        export(trained_parity[0].run_dir, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_existing_folder_is_not_overwritten(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="/out "):
        export("anything", tmp_path / "out")


def test_damaged_export_is_an_error(trained, tmp_path):
    folder = trained[0].run_dir
    export(folder, tmp_path / "out")
    (tmp_path / "out" / "training.json").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors .*training\.json"):
        evaluate(str(tmp_path / "out"))
