"""Tilings that `resident.tuning` has measured to be the fastest, stored on disk; valid until the kernels' sources
change."""

import hashlib
import json
from dataclasses import asdict, fields
from pathlib import Path

from flashrnn.cache import cache_folder, store
from flashrnn.cuda.build import sources_hash
from flashrnn.cuda.resident.solver import is_solution
from flashrnn.cuda.resident.tiling import Tiling
from flashrnn.cuda.spec import KernelSpec


def saved_tiling(spec: KernelSpec) -> Tiling | None:
    """Return the saved tiling for the spec's sizes; None without one, or if it is no solution of the problem."""
    try:
        tiling = Tiling(**json.loads(_path(spec).read_text())["tiling"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    typed = all(type(getattr(tiling, field.name)) is field.type for field in fields(Tiling))
    return tiling if typed and is_solution(spec, tiling) else None


def save_tiling(spec: KernelSpec, tiling: Tiling, us: float) -> None:
    """Save the fastest tiling. `us`, its measured time per step, is for people who read the file."""
    content = {"tiling": asdict(tiling), "us": us, "spec": str(spec)}
    store({_path(spec): json.dumps(content, indent=2).encode()})


def _path(spec: KernelSpec) -> Path:
    identity = repr((str(spec), spec.cell.key, spec.gpu, spec.variant.tf32, sources_hash()))
    return cache_folder() / f"tuned-{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"
