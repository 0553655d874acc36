"""A run that goes on: by which command, from which checkpoint, and whether the two fit together."""

from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from training.command_line import literal, quoted, unquoted
from training.configuration import CONFIGS, chooses_backend, leaves


class Resumed(NamedTuple):
    """A checkpoint to go on from."""

    file: Path
    content: dict[str, Any]


def command_of_run(arguments: list[str]) -> list[str]:
    """Return the arguments after those of the run that ckpt_path resumes, if they choose no option of a group."""
    from training import checkpoint

    given = {argument.partition("=")[0]: argument.partition("=")[2] for argument in arguments}
    if given.get("ckpt_path", "") in ("", "null") or any(Path(CONFIGS, key).is_dir() for key in given):
        return literal(arguments, paths=["ckpt_path", "init_from"])
    file = checkpoint.find(unquoted(given["ckpt_path"]), given.get("name"))
    again = {argument.partition("=")[0] for argument in arguments if argument.startswith(("+", "hydra."))}
    before = [
        override
        for override in checkpoint.load(file)["config"]["overrides"]
        if override.partition("=")[0] not in {"ckpt_path", *again}  # Hydra adds a key once
    ]
    return [*before, *(f"ckpt_path={quoted(file)}" if o.startswith("ckpt_path=") else o for o in arguments)]


def command_to_record(hydra: DictConfig) -> list[str]:
    """Return the overrides of a command, and as one more the folders of configs that it was given.

    Args:
        hydra: Hydra's own config.
    """
    ours = ("hydra", "main", "schema")
    folders = [source.path for source in hydra.runtime.config_sources if source.provider not in ours]
    search = [f"hydra.searchpath=[{','.join(quoted(f'file://{folder}') for folder in folders)}]"] if folders else []
    return [*search, *hydra.overrides.task]


def find_resumed(config: DictConfig) -> Resumed | None:
    """Return what the config resumes; raise where it may not, or where its folder holds another run."""
    from training import checkpoint

    if config.ckpt_path == "":
        raise ValueError("ckpt_path= is empty: give the folder of a run, a checkpoint file or last; null begins anew")
    file = checkpoint.find(config.ckpt_path, config.name) if config.ckpt_path is not None else None
    _check_folder(Path(config.run_dir), file)
    if file is None:
        return None
    resumed = Resumed(file, checkpoint.load(file))
    check_data(resumed, config)
    check_tokenizer(resumed, config)
    check_unseen(resumed.content, config)
    return resumed


def _check_folder(folder: Path, resumed: Path | None) -> None:
    """Raise where a run would write over another one: its folder has checkpoints, and none of them is resumed."""
    from training.checkpoint import of_run, run_folder

    own = resumed and run_folder(resumed)
    if of_run(folder) and not (own and own.samefile(folder)):
        raise FileExistsError(
            f"{folder} holds a run: ckpt_path={folder} goes on with it, another hydra.run.dir=... begins a new one"
        )


def check_data(resumed: Resumed, config: DictConfig) -> None:
    """Raise where a run would go on with data of another kind, as with the default experiment's."""
    before, now = resumed.content["config"]["data"]["_target_"], config.data._target_
    if before != now:
        raise ValueError(
            f"{resumed.file} was trained on {before}, and this command has {now}: with a GROUP=OPTION a run's own "
            "command is not taken over, so give its experiment=... or data=... again"
        )


def check_tokenizer(resumed: Resumed, config: DictConfig) -> None:
    """Raise unless the config names the tokenizer that the model of the checkpoint was trained with."""
    from data import tokenization
    from training.checkpoint import tokenizer_folder

    before, now = (of.get("tokenizer") for of in (resumed.content["config"]["data"], config.data))
    folder = tokenizer_folder(resumed.file)
    if now != before and not (folder and tokenization.same(now, folder)):
        raise ValueError(
            f"data.tokenizer={now}: {resumed.file} was trained with {before}, and a model keeps its tokenizer"
        )


def check_unseen(content: dict[str, Any], config: DictConfig) -> None:
    """Raise where the language model of a checkpoint would be evaluated on documents that it was trained on."""
    before, now = content["config"]["data"], config.data
    if now.get("val_split") is not None or now.get("source") != before.get("source") or "val_fraction" not in now:
        return
    if before["val_split"] is not None or now.val_fraction > before["val_fraction"]:
        split = "val_fraction" if before["val_split"] is None else "val_split"
        raise ValueError(
            f"data.val_fraction={now.val_fraction}: the run held out data.{split}={before[split]}, and was trained on "
            "other documents of this text; validate on those that it held out, or on another data.source"
        )


def steps_left(resumed: Resumed, config: DictConfig) -> bool:
    """Return whether there are steps left to train; raise if the checkpoint holds another model than the config, and if
    nothing is left, though its run was evaluated."""
    from training.checkpoint import run_folder

    file, content = resumed
    sections = content["config"]["model"], OmegaConf.to_container(config.model, resolve=True)
    saved, asked = (
        {key: value for key, value in leaves(section, "model").items() if not chooses_backend(key)}
        for section in sections
    )
    if saved != asked:
        keys = [key for key in saved | asked if saved.get(key) != asked.get(key)]
        differences = [
            f"\n  {key}: {saved.get(key)} in the checkpoint, {asked.get(key)} in this config" for key in keys
        ]
        raise ValueError(f"{file} holds another model:{''.join(differences)}")
    run = run_folder(file)
    left = config.trainer.max_steps - content["global_step"]
    if left <= 0 and (run is None or (run / "eval.json").exists()):
        raise ValueError(
            f"{file} is at step {content['global_step']}, so nothing is left of trainer.max_steps="
            f"{config.trainer.max_steps}: raise it, or use scripts.evaluate"
        )
    return left > 0
