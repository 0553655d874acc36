"""Evaluation from a checkpoint, on the data of its run or on other data; errors have one line."""

import json
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError
from torch.nn.functional import cross_entropy

from scripts.train import train
from tests.tiny_runs import SHORT, TINY, evaluate, metrics, write_texts
from tests.tiny_runs import config as config_of
from training import checkpoint, evaluation
from training.evaluation import changed_config
from training.export import export
from training.lightning_module import TrainingModule


def test_evaluation_needs_only_the_checkpoint(tiny_config):
    """The result equals that at the end of training."""
    config = tiny_config("parity", "model=gru")
    trained = train(config)
    file = checkpoint.find(config.run_dir)
    elsewhere = file.rename(file.parents[4] / "kept.ckpt")
    assert evaluate(str(elsewhere)) == trained


@pytest.mark.drawn
def test_evaluation_of_a_run_folder_on_other_lengths(tiny_config):
    config = tiny_config("parity")
    train(config)
    result = evaluate(config.run_dir, "data.eval_lengths=[6,9,20]")
    assert [part["lengths"] for part in result["ranges"]] == [[6, 8], [9, 20]]
    (folder,) = checkpoint.Path(config.run_dir).glob("evaluate_*")
    saved = json.loads((folder / "eval.json").read_text())
    assert saved["ranges"] == result["ranges"]
    assert saved["config"]["data"]["eval_lengths"] == [6, 9, 20]
    assert (folder / "accuracy.png").is_file()


def test_evaluation_of_text(trained):
    config, result = trained
    assert evaluate(config.run_dir) == pytest.approx(result)
    rounded = evaluation.evaluate(config.run_dir, {}, "int8")
    assert rounded != pytest.approx(result)
    assert rounded == pytest.approx(result, rel=1e-2)


def test_evaluation_uses_the_tokenizer_of_the_run(tiny_config, change_texts, tmp_path):
    """A tokenizer trained on the changed corpus would not fit the weights."""
    config = tiny_config("text_tiny")
    train(config)
    change_texts()
    evaluate(config.run_dir)
    (used,) = tmp_path.glob("corpora/*/tokenizer/tokenizer.json")
    assert used.read_text() == (tmp_path / "outputs/text_tiny/run/tokenizer/tokenizer.json").read_text()


def test_evaluation_on_another_source_with_separate_validation_files(tiny_config, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("another text. " * 99)
    config = tiny_config("text_tiny", f"data.val_split={other}")
    train(config)
    with pytest.raises(ValueError, match=r"data\.source .*data\.val_split=.*other\.txt"):
        evaluate(config.run_dir, f"data.source={tmp_path}/texts/1.jsonl")


def test_overrides_are_applied_to_the_config():
    saved = {"data": {"eval_lengths": [40, 64], "seed": 0}, "seed": 0, "trainer": {"accelerator": "gpu"}}
    changed = changed_config(saved, {"data": {"eval_lengths": [40, 64, 512]}, "seed": 3})
    auto = {"accelerator": "auto"}  # models trained on a GPU can be evaluated without one
    assert changed == {"data": {"eval_lengths": [40, 64, 512], "seed": 0}, "seed": 3, "trainer": auto}


@pytest.mark.parametrize("key", ["data.eval_length", "sed", "dota.seed"])
def test_unknown_key_is_an_error(key):
    saved = {"data": {"eval_lengths": [40, 64], "seed": 0}, "seed": 0, "trainer": {"accelerator": "gpu"}}
    with pytest.raises(ConfigKeyError, match=key.rpartition(".")[2] if "dota" not in key else "dota"):
        changed_config(saved, OmegaConf.from_dotlist([f"{key}=1"]))


@pytest.mark.parametrize(
    "override",
    [
        "seed=7",
        "trainer.devices=2",
        "trainer.strategy=ddp",
        "optim.lr=3",
        "trainer.max_steps=3",
        "data.tokenizer=bpe:9",
        "compile=true",
        "name=other",
    ],
)
def test_key_without_effect_is_an_error(override):
    with pytest.raises(ValueError, match=f"^{override.partition('=')[0]} "):
        evaluate("anything", override)


def test_wrong_type_is_an_error(trained_parity):
    with pytest.raises(ValueError, match=r"data\.eval_batches=many: expected a number"):
        evaluate(trained_parity[0].run_dir, "data.eval_batches=many")


def test_parent_folder_of_runs_is_an_error(tmp_path):
    (tmp_path / "2026-01-01" / "checkpoints").mkdir(parents=True)
    (tmp_path / "2026-01-01" / "checkpoints" / "last.ckpt").touch()
    with pytest.raises(FileNotFoundError, match=r"/2026-01-01$"):
        evaluate(str(tmp_path))


def test_weights_of_another_model_are_an_error(trained_parity, tmp_path):
    content = torch.load(checkpoint.find(trained_parity[0].run_dir))
    content["config"]["model"]["d_model"] = 16
    torch.save(content, tmp_path / "wider.ckpt")
    with pytest.raises(ValueError, match=r"wider\.ckpt [\s\S]*size mismatch"):
        evaluate(tmp_path / "wider.ckpt")


def test_override_of_the_model_is_an_error():
    with pytest.raises(ValueError, match=r"model\.num_heads"):
        evaluate("anything", "model.num_heads=1")


def test_evaluation_on_training_text_is_an_error(trained):
    config, _ = trained
    for fraction in (0.2, 0.3):
        assert evaluate(config.run_dir, f"data.val_fraction={fraction}")["perplexity"] > 1
    with pytest.raises(ValueError, match=r"data\.val_fraction=0\.5"):
        evaluate(config.run_dir, "data.val_fraction=0.5")


def test_unigram_perplexity_is_omitted_for_a_part_of_the_text(trained):
    config, result = trained
    assert result["unigram_perplexity"] > 1
    assert evaluate(config.run_dir, "trainer.limit_val_batches=1")["unigram_perplexity"] is None


def test_missing_checkpoint_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"/nowhere\.ckpt"):
        evaluate(str(tmp_path / "nowhere.ckpt"))
    with pytest.raises(FileNotFoundError, match=r"/checkpoints/last\.ckpt"):
        evaluate(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 cut off"])
def test_damaged_checkpoint_is_an_error(tmp_path, content):
    file = tmp_path / "damaged.ckpt"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"/damaged\.ckpt "):
        evaluate(str(file))


def test_truncated_checkpoint_is_an_error(trained_parity, tmp_path):
    file = tmp_path / "truncated.ckpt"
    file.write_bytes(checkpoint.find(trained_parity[0].run_dir).read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"truncated\.ckpt .*damaged"):
        evaluate(str(file))


@pytest.mark.parametrize("content", [{"state_dict": {}}, [1, 2]])
def test_checkpoint_of_another_program_is_an_error(tmp_path, content):
    torch.save(content, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match=r"/other\.ckpt "):
        evaluate(str(tmp_path / "other.ckpt"))


@pytest.mark.drawn
@pytest.mark.parametrize("model", [pytest.param("model=slstm", marks=pytest.mark.slow), "model=hybrid"])
def test_losses_by_position_equal_those_of_whole_documents(model, tiny_config, tmp_path):
    """Documents are read in windows. Attention reads the whole document, or `eval_context` tokens."""
    blocks = ["model.num_blocks=3"] if model == "model=hybrid" else []
    write_texts(tmp_path / "texts" / "long.jsonl", (f"text {n} has {n**3}. " * 200 for n in range(6)))
    few = ["val_every=8", "trainer.limit_val_batches=2"]
    config = tiny_config("text_tiny", model, *blocks, "data.eval_length=256", "data.batch_size=2", *few)
    found = train(config)["by_position"]
    data = instantiate(config.data)
    data.setup()
    batches = list(data.test_dataloader())
    module = TrainingModule(instantiate(config.model))
    module.load_state_dict(checkpoint.load(checkpoint.find(config.run_dir))["state_dict"])
    losses = []
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        ids = torch.cat((first["input_ids"], second["input_ids"]), dim=1)
        labels = torch.cat((first["labels"], second["labels"]), dim=1)
        with torch.no_grad():
            logits = module.model(ids)
        losses.append(cross_entropy(logits.mT, labels, reduction="none")[(labels >= 0).all(1)])
    losses = torch.cat(losses)
    assert len(losses) == found["documents"] > 2
    expected = losses.unflatten(1, (2, 128)).mean(dim=(0, 2))
    torch.testing.assert_close(torch.tensor(found["losses"]), expected, rtol=1e-4, atol=1e-5)
    first, second = found["state_mib"]
    assert first == second if model == "model=slstm" else first < second
    assert Path(config.run_dir, "perplexity_by_position.png").stat().st_size > 10_000
    anew = evaluate(config.run_dir, "data.eval_context=128")["by_position"]["losses"]
    assert anew[0] == pytest.approx(found["losses"][0], rel=1e-5)
    assert anew[1] != pytest.approx(found["losses"][1], rel=1e-5)


def test_mix_is_evaluated_on_the_mixture_and_on_each_source(tiny_config, tmp_path):
    texts = [f"{{source: {tmp_path}/texts/{part}.jsonl, weight: {part}}}" for part in (1, 2)]
    sources = f"data.sources={{ones: {texts[0]}, twos: {texts[1]}}}"
    tiny = [part for part in TINY["text_tiny"] if "data.batch_size" not in part]
    loading = ["data.batch_size=16", "data.num_workers=0", "data.prepare_processes=0"]
    folder = f"run_dir={tmp_path}/outputs/mix"
    config = config_of("experiment=text_tiny", "data=mix", sources, *tiny, *loading, *SHORT, folder)
    tiny_config("text_tiny")  # creates the texts
    result = train(config)
    assert result["sources"].keys() == {"ones", "twos"}
    logged = [row["val/perplexity"] for row in metrics(Path(config.run_dir)) if row["val/perplexity"]]
    assert len(logged) == 3  # two validations and the evaluation on all
    low, high = sorted(found["perplexity"] for found in result["sources"].values())
    assert low <= result["perplexity"] <= high
    assert evaluate(config.run_dir)["perplexity"] == pytest.approx(result["perplexity"])
    card = export(config.run_dir, tmp_path / "out").joinpath("README.md").read_text()
    assert f"{tmp_path}/texts/1.jsonl (weight 1), {tmp_path}/texts/2.jsonl (weight 2) |" in card
