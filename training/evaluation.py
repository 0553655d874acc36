"""What a trained model can do on the data that it is evaluated on."""

from datetime import datetime
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from training.command_line import prepare_process
from training.config_checks import check_evaluation, check_nulls
from training.overrides import check_type

if TYPE_CHECKING:
    from lightning import LightningDataModule, Trainer

    from training.lightning_module import TrainingModule


def evaluate(trainer: "Trainer", module: "TrainingModule", datamodule: "LightningDataModule") -> dict:
    """What a trained model can do on the data it is evaluated on; training.results shows it."""
    from data.state_tracking import StateTracking

    if not isinstance(datamodule, StateTracking):
        metrics = trainer.validate(module, datamodule=datamodule, verbose=False)[0]
        limit = trainer.limit_val_batches
        whole = isinstance(limit, float) and limit == 1.0  # 1 is one batch
        # of the same text, or it is no comparison
        unigram = datamodule.unigram_perplexity() if whole and not datamodule.streaming else None
        return {"perplexity": metrics["val/perplexity"], "unigram_perplexity": unigram}

    trainer.test(module, datamodule=datamodule, verbose=False)
    loader, length, right = module.test_sequences.unbind(dim=1)
    ranges = []
    for index, (low, high) in enumerate(datamodule.eval_ranges):
        of_range = right[loader == index]
        ranges.append({"lengths": [low, high], "accuracy": of_range.mean().item(), "sequences": len(of_range)})
    return {
        "task": datamodule.task.name,
        "chance": datamodule.chance,
        "training_lengths": [datamodule.min_length, datamodule.max_length],
        "ranges": ranges,
        "accuracy_by_length": {int(n): right[length == n].mean().item() for n in length.unique()},
    }


def config_with(saved: dict, overrides: list[str]) -> DictConfig:
    """The saved config with KEY=VALUE overrides; keys that it does not have are an error."""
    config = OmegaConf.create(saved)
    OmegaConf.set_struct(config, True)
    for override in overrides:
        key = override.partition("=")[0]
        default = OmegaConf.select(config, key)
        try:
            config.merge_with_dotlist([override])
        except (ConfigAttributeError, ConfigKeyError) as error:
            parent = OmegaConf.select(config, key.rpartition(".")[0] or ".")
            keys = ", ".join(parent) if isinstance(parent, DictConfig) else ""
            raise ValueError(f"unknown key in {override!r}; allowed there: {keys or ', '.join(config)}") from error
        if (value := OmegaConf.select(config, key)) is not None:
            check_type(key, value, default)
    return config


_ONE_DEVICE = {"devices": 1, "num_nodes": 1, "strategy": "auto"}
_NOT_READ = {
    "seed": "data.seed draws other sequences",
    "data.tokenizer": "a model keeps the tokenizer that it was trained with",
    "name": "a run keeps its name",
    "compile": "it is for training",
    **{f"trainer.{key}": "an evaluation runs on one device" for key in _ONE_DEVICE},
}
_OF_TRAINING = ("optim.", "checkpoint.", "logger", "callbacks", "val_every", "global_batch_size", "trainer.max_")


def _check_read(overrides: list[str]) -> None:
    for override in overrides:
        key = override.partition("=")[0]
        reason = "it is for training" if key.startswith(_OF_TRAINING) else _NOT_READ.get(key)
        if reason:
            raise ValueError(f"{override} would change nothing: {reason}")
        if key.startswith("model.") and key != "model.mixer.backend":
            raise ValueError(f"{override}: a checkpoint is of the model that was trained")


def _check_source(datamodule: "LightningDataModule", overrides: list[str]) -> None:
    """Raise where another source is given to a run that validates on files of their own, which it does not change."""
    from data.text import Text

    keys = {override.partition("=")[0] for override in overrides}
    if not isinstance(datamodule, Text) or "data.source" not in keys or "data.val_split" in keys:
        return
    if (validation := datamodule.recipe.val_corpus) and validation.files is not None:
        raise ValueError(
            f"data.source is not what is evaluated: the run validates on data.val_split={validation.source}; name the "
            "files there, or set data.val_split=null to hold out data.val_fraction of the source"
        )


def main(ckpt: str, overrides: list[str]) -> dict:
    """Evaluate the checkpoint `ckpt` and leave the results in a new folder of its run."""
    from hydra.utils import instantiate

    from training import checkpoint, results
    from training.lightning_module import TrainingModule

    _check_read(overrides)
    file = checkpoint.find(ckpt)
    content = checkpoint.load(file)
    config = config_with(content["config"], ["trainer.accelerator=auto", *overrides])
    checkpoint.check_unseen(content, config)
    prepare_process(config.threads)
    check_nulls("data", config.data)
    check_evaluation(config.trainer)
    datamodule = instantiate(config.data)
    _check_source(datamodule, overrides)
    if tokenizer := checkpoint.tokenizer_folder(file):
        datamodule.take_tokenizer(tokenizer)
    module = TrainingModule(instantiate(config.model))
    checkpoint.load_weights(module, file, content)
    folder = (checkpoint.run_folder(file) or file.parent) / f"evaluate_{datetime.now():%Y-%m-%d_%H-%M-%S_%f}"
    here = {"default_root_dir": folder, "logger": False, "enable_checkpointing": False}
    trainer = instantiate(config.trainer, **_ONE_DEVICE, **here)
    result = evaluate(trainer, module, datamodule)
    places = results.save(folder, result, config, trainer.strategy.root_device, step=content["global_step"])
    results.show(result, {"checkpoint": file, **places})
    return result
