"""The attributes of a LightningDataModule that training uses beyond Lightning's hooks. All of them are optional:

vocab_size, num_classes: the sizes of the model that its config leaves open.
evaluate(trainer, module) -> dict: evaluate the trained model; the result must be serialisable as JSON, and a sweep
    optimises its first number. Without this method, loss, perplexity and accuracy on val_dataloader are reported.
metrics: names of the numbers in the result of `evaluate`. Without it, the key `metric` is checked only after training.
    If "perplexity" is not among them, perplexity is not logged.
samples(number, length): return at most `number` prompts that the model continues after each validation, each int64
    [tokens], of `length` tokens if the data have no prompts of their own.
tokenizer: decodes tokens by `decode`, and is saved in the folder of the run by `save_pretrained`.
take_tokenizer(folder): use the tokenizer that an earlier run has saved.
may_change: names of the arguments that may differ in a resumed run; without it, all may.
check_evaluation_of(keys): raise for changed keys of the config that do not change what is evaluated.
epoch_progress: for data that resume within an epoch, the number of batches used and of all batches of the epoch, or
    None without epochs. Without this attribute, Lightning's own count in the checkpoint is used.
distributes_itself: whether its loaders give each device its share of the samples; otherwise Lightning's sampler does.

A batch is a dict of input_ids [B, T], labels [B, T] (models.loss.IGNORE where nothing is scored) and, optionally, reset
[B, T], the arguments of `SequenceModel.loss`.
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
    """Raise ValueError for a value of the key `metric` that the evaluation of the data will not return."""
    known = getattr(data, "metrics", None if hasattr(data, "evaluate") else _OF_VALIDATION)
    if name is not None and known is not None and name not in known:
        raise ValueError(f"metric={name}: the evaluation of {type(data).__name__} has {', '.join(known)}")


def samples(data: LightningDataModule, number: int, length: int) -> Sequence[Tensor] | None:
    """Return the prompts that a model continues after each validation; None if it generates nothing."""
    return data.samples(number, length) if hasattr(data, "samples") else None


def decoded(data: LightningDataModule, tokens: Tensor) -> str:
    """Return tokens [T] as text, or as numbers if there is no tokenizer."""
    tokenizer = getattr(data, "tokenizer", None)
    return " ".join(map(str, tokens.tolist())) if tokenizer is None else tokenizer.decode(tokens)


def take_tokenizer(data: LightningDataModule, saved: Path | None) -> None:
    """Pass the tokenizer saved in a folder to the data, if there is one and the data accept it."""
    if saved is not None and hasattr(data, "take_tokenizer"):
        data.take_tokenizer(saved)


def check_evaluation_of(data: LightningDataModule, changed: Iterable[str]) -> None:
    """Raise ValueError for changed keys of the config that do not change what is evaluated."""
    if hasattr(data, "check_evaluation_of"):
        data.check_evaluation_of(changed)
