"""Checkpoints: writing them atomically, finding them by file or run folder, and loading them with clear errors."""

import json
import sys
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from safetensors.torch import load_file
from torch import nn

from data.atomic_file import replacing
from training._compat import saved_step

LAST = "last.ckpt"
PREVIOUS = "previous.ckpt"  # the checkpoint before last.ckpt
OUTPUTS = Path("outputs")
TOKENIZER = "tokenizer"  # folder of a language model's tokenizer, inside the folder of the run
SHOWN = 5  # largest number of mismatching weights listed in an error
EXPORTED, TRAINING = "model.safetensors", "training.json"  # files of scripts.export: weights; config and step


class StepCheckpoint(ModelCheckpoint):
    """A ModelCheckpoint that saves every N steps, and also after the last step, however training ends.

    Its base class saves at the end of trainer.fit. By then the loops have advanced, and a resumed run would miscount
    its steps.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.monitor is not None:
            raise ValueError(
                f"checkpoint.monitor={self.monitor}: a checkpoint is saved before the validation of its step, so it "
                "would be judged by the previous validation; checkpoint.save_top_k=-1 keeps all checkpoints"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._step, self._stop = trainer.global_step, False

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        # Lightning calls checkpoint callbacks after all others, which may have asked to stop training.
        self._stop |= trainer.should_stop
        trainer.should_stop = self._stop and trainer.global_step != self._step  # stop only after a whole step
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        super().on_train_batch_end(trainer, pl_module, *batch)
        epochs = trainer.max_epochs != -1 and trainer.is_last_batch and trainer.current_epoch + 1 >= trainer.max_epochs
        if trainer.global_step == trainer.max_steps or trainer.received_sigterm or trainer.should_stop or epochs:
            self._save_last(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if trainer.should_stop and trainer.state.fn == "fit":
            self._save_last(trainer)

    def _save_last(self, trainer: Trainer) -> None:
        if not (self.save_last and saved_step(self) == trainer.global_step):
            trainer.save_checkpoint(Path(self.dirpath) / LAST)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pass


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints atomically, and keeps the replaced last.ckpt as previous.ckpt."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        path = Path(path)
        try:
            with replacing(path, backup=path.with_name(PREVIOUS) if path.name == LAST else None) as file:
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError if the disk is full
            reason = str(error).partition("\n")[0]
            raise OSError(
                f"the checkpoint {path} could not be written ({reason}): is the disk full? Earlier ones are intact"
            ) from error


def find(path: str, run_name: str | None = None) -> Path:
    """Return the checkpoint file that a path stands for.

    Args:
        path: a file; the folder of a run, for its newest readable checkpoint; the folder of an export; or "last", for
            the newest readable checkpoint of all runs.
        run_name: with "last", consider only runs of this name; None means all runs.

    Raises:
        FileNotFoundError: there is no checkpoint, or none that can be read.
        ValueError: the file is damaged or no checkpoint.
    """
    if path == "last":
        runs = OUTPUTS / str(run_name or "")  # a name may be a number
        files, missing = runs.rglob("checkpoints/*.ckpt"), f"ckpt_path=last: there is no checkpoint under {runs}"
        unreadable = f"ckpt_path=last: none of the checkpoints under {runs} can be read"
    else:
        file = Path(path)
        if (file / EXPORTED).is_file():
            return file / EXPORTED
        if file.is_file():
            load(file)
            return file
        files, unreadable = of_run(file), f"none of the checkpoints in {file} can be read"
        runs = sorted(str(found.parents[1]) for found in file.glob(f"**/checkpoints/{LAST}"))
        file = file / "checkpoints" / LAST if file.is_dir() else file
        missing = f"there is no checkpoint at {file}: expected a .ckpt file or the folder of a run"
        missing += f", such as {runs[-1]}" if runs else ""
    newest_first = sorted(files, key=lambda file: file.stat().st_mtime_ns, reverse=True)
    for file in newest_first:
        try:
            load(file)
        except ValueError as error:
            print(f"skipped: {error}", file=sys.stderr)
        else:
            return file
    raise FileNotFoundError(unreadable if newest_first else missing)


def of_run(folder: Path) -> list[Path]:
    """Return the checkpoint files in the folder of a run."""
    return list(folder.glob("checkpoints/*.ckpt"))


def load(file: Path) -> dict[str, Any]:
    """Return the content of a checkpoint of scripts.train, or what an exported folder has of it.

    Tensors are on the CPU; weights are read from the file when they are used.
    """
    try:
        if file.name == EXPORTED:
            content = _load_exported(file)
        elif is_zipfile(file):
            content = torch.load(file, "cpu", weights_only=True, mmap=True)
        else:
            raise ValueError("it is not a file that torch.save has finished")
        if not isinstance(content, dict) or not {"config", "state_dict"} <= content.keys():
            raise ValueError("it was not written by scripts.train")
    except Exception as error:  # torch raises many kinds
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{file} is damaged or no checkpoint of ours: {reason}") from error
    return content


def load_weights(module: nn.Module, file: Path, content: dict[str, Any]) -> None:
    """Set the weights of a module to those of a checkpoint; errors name its file."""
    try:
        module.load_state_dict(content["state_dict"])
    except RuntimeError as error:
        first, *others = str(error).splitlines()[1:]
        more = f" (and {len(others)} more like it)" if others else ""
        raise ValueError(f"the weights in {file} do not fit this model: {first.strip()}{more}") from error


def load_initial_weights(model: nn.Module, file: Path) -> None:
    """Set the weights of a model to those of a checkpoint or an exported model, before training.

    Raises:
        ValueError: weights are missing, unknown or of another shape; names them.
    """
    content = load_file(file) if file.name == EXPORTED else load(file)["state_dict"]
    found = {name.removeprefix("model."): weight for name, weight in content.items()}
    wanted = model.state_dict()
    differences = [
        f"\n  {name}: {_shape(found.get(name))} there, {_shape(wanted.get(name))} in this model"
        for name in sorted(found.keys() | wanted.keys())
        if _shape(found.get(name)) != _shape(wanted.get(name))
    ]
    if differences:
        more = f"\n  and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        raise ValueError(
            f"init_from: the weights in {file} are of another model; give the model=... and model.KEY=... of its run"
            f"{''.join(differences[:SHOWN])}{more}"
        )
    model.load_state_dict(found)


def _shape(weight: torch.Tensor | None) -> list[int] | None:
    return None if weight is None else list(weight.shape)


def _load_exported(file: Path) -> dict[str, Any]:
    return json.loads(file.with_name(TRAINING).read_text()) | {"state_dict": load_file(file)}


def run_folder(file: Path) -> Path | None:
    """Return the folder of the run that a checkpoint file belongs to; None for a file elsewhere."""
    return file.parents[1] if file.parent.name == "checkpoints" else None


def tokenizer_folder(file: Path) -> Path | None:
    """Return the folder of the tokenizer of a checkpoint or export; None if it has none."""
    if file.name == EXPORTED:
        import models.hugging_face  # noqa: F401, registers the config.json that transformers reads with the tokenizer

        return file.parent
    run = run_folder(file)
    folder = run and run / TOKENIZER
    return folder if folder and folder.is_dir() else None
