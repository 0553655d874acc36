"""The checkpoint from which a run resumes, and checks that it fits the config."""

from pathlib import Path
from typing import Any, NamedTuple

from hydra.utils import get_object
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from data import tokenization
from training import checkpoint
from training.configuration import chooses_backend, leaves
from training.resumed_config import differences


class Resumed(NamedTuple):
    """The checkpoint from which a run resumes."""

    file: Path
    content: dict[str, Any]


def find_resumed(config: DictConfig) -> Resumed | None:
    """Return the checkpoint that `ckpt_path` refers to, and print how the config differs from that of the checkpoint.

    Raise ValueError for differences that are not allowed, and FileExistsError if the folder of the new run contains
    another run. Return None if nothing is resumed.
    """
    if config.ckpt_path == "":
        raise ValueError(
            "ckpt_path= is empty: give the folder of a run, a checkpoint file, last, or null for a new run"
        )
    file = checkpoint.find(config.ckpt_path, config.name) if config.ckpt_path is not None else None
    check_folder(Path(config.run_dir), file)
    if file is None:
        return None
    if file.name == checkpoint.EXPORTED:
        raise ValueError(f"ckpt_path={file.parent} is an exported model: init_from=... starts a run from its weights")
    resumed = Resumed(file, checkpoint.load(file))
    check(resumed, config)
    rank_zero_only(print)("\n".join([f"resuming from {file}", *differences(resumed.content["config"], config)]))
    return resumed


def check(resumed: Resumed, config: DictConfig) -> None:
    """Raise ValueError if a run would resume with other data, another tokenizer or another model."""
    check_data(resumed, config)
    check_tokenizer(resumed, config)
    check_unseen(resumed.content, config)
    check_model(resumed, config)


def check_folder(folder: Path, resumed: Path | None) -> None:
    """Raise FileExistsError if the folder contains another run, which would be overwritten."""
    own = resumed and checkpoint.run_folder(resumed)
    if checkpoint.of_run(folder) and not (own and own.samefile(folder)):
        raise FileExistsError(
            f"{folder} contains a run: ckpt_path={folder} resumes it, another hydra.run.dir=... starts a new one"
        )


def check_data(resumed: Resumed, config: DictConfig) -> None:
    """Raise ValueError if a run would resume with other data, in which its position has no meaning."""
    before, now = resumed.content["config"]["data"], OmegaConf.to_container(config.data, resolve=True)
    may_change = getattr(get_object(now["_target_"]), "may_change", now)
    for key in ["_target_", *sorted(before.keys() & now.keys() - set(may_change))]:
        if before[key] != now[key]:
            raise ValueError(
                f"data.{key}={now[key]}: {resumed.file} was trained with {before[key]}, and a resumed run keeps its "
                "data; init_from=... starts a new run from its weights"
            )


def check_tokenizer(resumed: Resumed, config: DictConfig) -> None:
    """Raise ValueError unless the config names the tokenizer with which the checkpoint's model was trained."""
    before, now = (of.get("tokenizer") for of in (resumed.content["config"]["data"], config.data))
    folder = checkpoint.tokenizer_folder(resumed.file)
    if now != before and not (folder and tokenization.same(now, folder)):
        raise ValueError(
            f"data.tokenizer={now}: {resumed.file} was trained with {before}, and a resumed run must keep its tokenizer"
        )


def check_unseen(content: dict[str, Any], config: DictConfig) -> None:
    """Raise ValueError if the model of a checkpoint would be evaluated on documents that it was trained on."""
    before, now = content["config"]["data"], config.data
    if now.get("val_split") is not None or now.get("source") != before.get("source") or "val_fraction" not in now:
        return
    if before.get("val_split") is not None or now.val_fraction > before["val_fraction"]:
        split = "val_fraction" if before.get("val_split") is None else "val_split"
        raise ValueError(
            f"data.val_fraction={now.val_fraction}: the run held out data.{split}={before[split]} and was trained on "
            "the other documents of this text; validate on those that it held out, or on another data.source"
        )


def check_model(resumed: Resumed, config: DictConfig, open_sizes: bool = True) -> None:
    """Raise ValueError if the model of the checkpoint is not that of the config.

    Args:
        resumed: the checkpoint.
        config: the config of the run that resumes it.
        open_sizes: ignore sizes that the config leaves to the data.
    """
    sections = resumed.content["config"]["model"], OmegaConf.to_container(config.model, resolve=True)
    saved, asked = (
        {key: value for key, value in leaves(section, "model").items() if not chooses_backend(key)}
        for section in sections
    )
    different = [key for key in saved | asked if saved.get(key) != asked.get(key)]
    if open_sizes:
        different = [key for key in different if asked.get(key) is not None]
    if different:
        lines = [f"\n  {key}: {saved.get(key)} in the checkpoint, {asked.get(key)} in this config" for key in different]
        raise ValueError(f"{resumed.file} contains another model:{''.join(lines)}")


def steps_left(resumed: Resumed, config: DictConfig) -> bool:
    """Return whether there are steps left to train; raise ValueError if there are none and the run was evaluated."""
    check_model(resumed, config, open_sizes=False)
    file, content = resumed
    run = checkpoint.run_folder(file)
    left = config.trainer.max_steps - content["global_step"]
    if left <= 0 and (run is None or (run / "eval.json").exists()):
        raise ValueError(
            f"{file} is at step {content['global_step']}, so there is nothing left to train with trainer.max_steps="
            f"{config.trainer.max_steps}: increase it, or use scripts.evaluate"
        )
    return left > 0
