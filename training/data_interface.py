"""What training uses of a LightningDataModule beyond Lightning's hooks. Everything is optional:

vocab_size, num_classes: sizes of the model that its config leaves open.
evaluate(trainer, module) -> dict: what the trained model can do, as JSON; its first number is what a sweep optimises.
    Without it: loss, perplexity and accuracy on val_dataloader.
metrics: names of the numbers of `evaluate` that `metric` may choose; without it, they are checked after training.
samples(number, length): at most `number` beginnings that a model continues after each validation, each int64 [tokens],
    with `length` tokens where the data have no beginnings of their own.
tokenizer: decodes tokens by `decode`, and is saved in the folder of the run by `save_pretrained`.
take_tokenizer(folder): use the tokenizer that an earlier run has saved.
may_change: names of the arguments that may differ in a resumed run; without it, all.
check_evaluation_of(keys): raise for changed keys of the config that do not change what is evaluated.
epoch_progress: the batches that have been taken of the epoch and all that it has, or None without epochs, for data that
    resume within an epoch; without it, Lightning counts batches as the checkpoint does.
distributes_itself: whether its loaders give each device its share; without it, Lightning's sampler does.

A batch is a dict of input_ids [B, T], labels [B, T] (models.loss.IGNORE where nothing is scored), and perhaps reset
[B, T], as `SequenceModel.loss` takes them.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning import LightningDataModule, Trainer
from torch import Tensor

from training.lightning_module import TrainingModule

_OF_VALIDATION = ("loss", "perplexity", "accuracy")


def evaluate(data: LightningDataModule, trainer: Trainer, module: TrainingModule) -> dict[str, Any]:
    """Return the result of the data's own evaluation, or the metrics of a validation."""
    if hasattr(data, "evaluate"):
        return data.evaluate(trainer, module)
    metrics = trainer.validate(module, datamodule=data, verbose=False)[0]
    return {name.removeprefix("val/"): value for name, value in metrics.items()}


def check_metric(data: LightningDataModule, name: str | None) -> None:
    """Raise for a name of `metric` that the evaluation of the data will not return."""
    known = getattr(data, "metrics", None if hasattr(data, "evaluate") else _OF_VALIDATION)
    if name is not None and known is not None and name not in known:
        raise ValueError(f"metric={name}: the evaluation of {type(data).__name__} has {', '.join(known)}")


def samples(data: LightningDataModule, number: int, length: int) -> Sequence[Tensor] | None:
    """Return the beginnings that a model continues; None where it generates nothing."""
    return data.samples(number, length) if hasattr(data, "samples") else None


def decoded(data: LightningDataModule, tokens: Tensor) -> str:
    """Return tokens [T] as text, or as numbers where there is no tokenizer."""
    tokenizer = getattr(data, "tokenizer", None)
    return " ".join(map(str, tokens.tolist())) if tokenizer is None else tokenizer.decode(tokens)


def take_tokenizer(data: LightningDataModule, saved: Path | None) -> None:
    """Give the data the tokenizer in a folder, if there is one and they take it."""
    if saved is not None and hasattr(data, "take_tokenizer"):
        data.take_tokenizer(saved)


def check_evaluation_of(data: LightningDataModule, changed: Iterable[str]) -> None:
    """Raise for changed keys of the config that do not change what is evaluated."""
    if hasattr(data, "check_evaluation_of"):
        data.check_evaluation_of(changed)
