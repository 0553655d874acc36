"""Configs in checkpoints of earlier versions, in the form of this version."""

import re
from typing import Any

_MOVED = ("optim.total_steps=", "optim.warmup_steps=")
_LOGGERS = {"training.metrics_file.MetricsFile": "csv", "training.loggers.wandb_logger": "wandb"}


def upgraded(config: dict[str, Any]) -> dict[str, Any]:
    """Return a saved config with schedule and loggers as groups."""
    config = dict(config)
    optim, logger = config.get("optim") or {}, config.get("logger") or {}
    overrides = list(config.get("overrides") or [])
    if optim.get("_target_") == "training.optim.adamw_cosine":
        config |= _with_schedule(dict(optim))
        overrides = [o.replace("optim.", "schedule.", 1) if o.startswith(_MOVED) else o for o in overrides]
        overrides = [o for o in overrides if not o.startswith("optim.final_lr=")]  # the saved config has the ratio
    if "_target_" in logger:
        name = _LOGGERS.get(logger["_target_"], "logger")
        config["logger"] = {name: logger}
        overrides = [re.sub(r"^(\+*)logger\.", rf"\1logger.{name}.", override) for override in overrides]
    return config | {"overrides": overrides}


def _with_schedule(optim: dict[str, Any]) -> dict[str, dict]:
    """Return the sections `optim` and `schedule` of a saved section `optim` that held both."""
    schedule = {"_target_": "training.schedules.cosine"}
    schedule |= {key: optim.pop(key) for key in ("total_steps", "warmup_steps")}
    schedule["final_lr_ratio"] = optim.pop("final_lr") / optim["lr"]
    return {"optim": optim | {"_target_": "training.optim.adamw"}, "schedule": schedule}
