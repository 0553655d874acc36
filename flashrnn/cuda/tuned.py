"""Tilings that `flashrnn.cuda.tuning` found to be the fastest: kept on disk, until the kernels' sources change."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch

from flashrnn.cache import cache_folder, store
from flashrnn.cells import Cell
from flashrnn.cuda.build import sources_hash
from flashrnn.cuda.source import Tiling
from flashrnn.gpu import Gpu


class Sizes(NamedTuple):
    """What a tiling is chosen for, in each direction."""

    cell: Cell
    heads: int
    head_dim: int
    batch: int
    dtype: torch.dtype
    gpu: Gpu
    tf32: bool = False


def kept(direction: str, sizes: Sizes) -> Tiling | None:
    """The tiling that was found to be the fastest, or None."""
    try:
        return Tiling(**json.loads(_path(direction, sizes).read_text())["tiling"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep(direction: str, sizes: Sizes, tiling: Tiling, us: float) -> None:
    """`us`: what it was measured to take, for whoever reads the file."""
    content = {"tiling": asdict(tiling), "us": us, "cell": sizes.cell.name, "gpu": sizes.gpu.name}
    store({_path(direction, sizes): json.dumps(content, indent=2).encode()})


def _path(direction: str, sizes: Sizes) -> Path:
    identity = repr((direction, sizes.cell.key, *sizes[1:], sources_hash()))
    return cache_folder() / f"tuned-{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"
