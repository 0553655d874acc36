"""The config of a resumed run: that of the original run with the changes of the command that resumes it."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from training.arguments import literal, quoted, unquoted
from training.configuration import composed, leaves

_OF_EACH_COMMAND = ("run_dir", "ckpt_path", "overrides")
_BY_THE_DATA = ("model.vocab_size", "model.num_classes")  # set from the data if they are null


def command_of_run(arguments: list[str]) -> list[str]:
    """Return the arguments of a command, preceded by those of the run that its ckpt_path resumes."""
    given = {argument.partition("=")[0]: argument.partition("=")[2] for argument in arguments}
    if given.get("ckpt_path", "") in ("", "null"):
        return literal(arguments, paths=["ckpt_path", "init_from"])
    from training import checkpoint  # here, because it imports PyTorch, which --help and wrong commands do not need

    file = checkpoint.find(unquoted(given["ckpt_path"]), given.get("name"))
    before = [
        override
        for override in checkpoint.load(file)["config"]["overrides"]
        if override.partition("=")[0] not in {"ckpt_path", *given}
    ]
    return [*before, *(f"ckpt_path={quoted(file)}" if o.startswith("ckpt_path=") else o for o in arguments)]


def command_to_record(hydra: DictConfig) -> list[str]:
    """Return the overrides of a command, and one for the config folders that it was given.

    Args:
        hydra: Hydra's own config.
    """
    ours = ("hydra", "main", "schema")
    folders = [source.path for source in hydra.runtime.config_sources if source.provider not in ours]
    search = [f"hydra.searchpath=[{','.join(quoted(f'file://{folder}') for folder in folders)}]"] if folders else []
    return [*search, *hydra.overrides.task]


def take_saved_values(config: DictConfig) -> None:
    """Restore the values of the resumed run where files in configs/ have changed since; overrides keep their effect.

    Args:
        config: the config composed from the overrides of the run, followed by those of this command.
    """
    from training import checkpoint

    if not config.ckpt_path:
        return
    saved = checkpoint.load(checkpoint.find(config.ckpt_path, config.name))["config"]
    without_changes = composed([*saved["overrides"], f"run_dir={quoted(config.run_dir)}"])
    then, now = (_leaves(composition) for composition in (without_changes, config))
    for key, value in _leaves(saved).items():
        changed = key in _OF_EACH_COMMAND or key not in now or then.get(key) != now[key]
        if not changed and value != now[key] and not _is_interpolation(config, key):
            OmegaConf.update(config, key, value)


def _leaves(config: DictConfig | dict[str, Any]) -> dict[str, Any]:
    plain = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config
    return {key.removeprefix("."): value for key, value in leaves(plain, "").items()}


def _is_interpolation(config: DictConfig, key: str) -> bool:
    section, _, name = key.rpartition(".")
    return OmegaConf.is_interpolation(OmegaConf.select(config, section) if section else config, name)


def differences(saved: dict[str, Any], config: DictConfig) -> list[str]:
    """Return a line of text for each value that differs between a checkpoint's config and that of the resuming run."""
    before, now = _leaves(saved), _leaves(config)
    lines = []
    for key in sorted(before.keys() | now.keys()):
        if key in _OF_EACH_COMMAND or (key in _BY_THE_DATA and now.get(key) is None):
            continue
        old, new = before.get(key), now.get(key)
        if isinstance(old, str):  # several values contain the folder of the run
            old = old.replace(before["run_dir"], now["run_dir"])
        if old == new or key == "logger.wandb.id":
            continue
        lines.append(f"  {key}: {old if key in before else 'absent'} in the run, {new if key in now else 'absent'} now")
    return lines
