"""User-defined LightningDataModules can be trained, resumed and evaluated, and may define more methods."""

import json
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from scripts.train import train
from tests.tiny_runs import evaluate, losses
from training.build import build_trainer


class Successors(L.LightningDataModule):
    """A DataModule with only Lightning's hooks, in which each token is followed by the next number."""

    def __init__(self, size=64):
        super().__init__()
        self.size = size

    def loader(self, number, shuffle=False):
        starts = torch.arange(number)[:, None] % 5
        tokens = (starts + torch.arange(7)) % 5
        rows = [{"input_ids": row[:-1], "labels": row[1:]} for row in tokens]
        return DataLoader(rows, batch_size=8, shuffle=shuffle)

    def train_dataloader(self):
        return self.loader(self.size, shuffle=True)

    def val_dataloader(self):
        return self.loader(16)


class Decoder:
    def decode(self, tokens):
        return "".join("abcde"[token] for token in tokens)

    def save_pretrained(self, folder):
        Path(folder).mkdir()
        Path(folder, "letters.txt").write_text("abcde")


class Spoken(Successors):
    """A DataModule with the whole interface."""

    vocab_size = num_classes = 5
    tokenizer = Decoder()
    may_change = ()
    metrics = ("share_right",)

    def evaluate(self, trainer, module):
        (metrics,) = trainer.validate(module, datamodule=self, verbose=False)
        return {"share_right": metrics["val/accuracy"], "note": "of successors"}

    def samples(self, number, length):
        return next(iter(self.val_dataloader()))["input_ids"][:number, :length]


@pytest.fixture
def of(tiny_config):
    """Return a function that builds the config of a run with a DataModule, as in `of(Successors, "val_every=2")`."""

    def build(kind, *overrides, run="run", **arguments):
        config = tiny_config("parity", "schedule.total_steps=100", *overrides, run=run)
        config.data = {"_target_": f"{__name__}.{kind.__name__}", **arguments}
        return config

    return build


def test_datamodule_with_only_lightnings_hooks(of, capsys):
    config = of(Successors, "model.vocab_size=5", "model.num_classes=5", "trainer.max_steps=40")
    result = train(config)
    assert result.keys() == {"loss", "perplexity", "accuracy"}
    assert result["loss"] < 1.5  # guessing has log 5 = 1.61
    assert evaluate(config.run_dir) == pytest.approx(result)
    assert "perplexity" in capsys.readouterr().out.partition("Evaluation:")[2]
    assert not Path(config.run_dir, "samples.txt").exists()
    more = ["model.vocab_size=5", "model.num_classes=5", "trainer.max_steps=44", f"ckpt_path={config.run_dir}"]
    resumed = of(Successors, *more, run="next", size=96)
    train(resumed)
    assert list(losses(Path(resumed.run_dir))) == [40, 41, 42, 43]


def test_datamodule_with_the_whole_interface(of):
    config = of(Spoken, size=64)
    result = train(config)
    folder = Path(config.run_dir)
    assert result.keys() == {"share_right", "note"}
    assert json.loads((folder / "eval.json").read_text())["note"] == "of successors"
    samples = folder.joinpath("samples.txt").read_text().splitlines()
    assert samples[0] == "--- step 4"
    assert samples[1].startswith("abcdea|")
    assert (folder / "tokenizer" / "letters.txt").read_text() == "abcde"
    with pytest.raises(ValueError, match=r"data\.size=32: .* 64"):
        train(of(Spoken, f"ckpt_path={config.run_dir}", size=32, run="next"))


@pytest.mark.parametrize(
    ("kind", "evaluated"), [(Successors, "loss, perplexity, accuracy"), (Spoken, "share_right")], ids=["hooks", "own"]
)
def test_unknown_metric_is_an_error_before_training(kind, evaluated, of):
    config = of(kind, "metric=bits", "model.vocab_size=5", "model.num_classes=5")
    with pytest.raises(ValueError, match=f"metric=bits: .*{kind.__name__} has {evaluated}"):
        train(config)
    assert not Path(config.run_dir).exists()


def test_missing_vocab_size_is_an_error(of):
    with pytest.raises(ValueError, match=r"model\.vocab_size .*Successors"):
        train(of(Successors))


def test_global_batch_size_without_batch_size_is_an_error(of):
    with pytest.raises(Exception, match=r"global_batch_size=64 .*batch_size"):
        train(of(Spoken, "global_batch_size=64"))


def test_devices_get_different_samples(of, tiny_config):
    """By Lightning's sampler, or by the data's own sampler."""
    assert build_trainer(of(Spoken))._accelerator_connector.use_distributed_sampler
    assert not build_trainer(tiny_config("parity"))._accelerator_connector.use_distributed_sampler
