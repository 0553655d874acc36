"""The sizes of the sweep: an LSTM over head size and over batch size, dense where tilings change.

It imports nothing slow.
"""

from dataclasses import replace
from typing import NamedTuple

from benchmarks.cases import HIDDEN, Case

_BASE = Case("lstm", 1, HIDDEN, 16, T=512)
_ODD = (31, 63, 65, 127, 255, 257, 511, 513, 767, 769, 1111)
_ONE_HEAD = (
    8, 16, 24, 32, 48, 56, 64, 72, 96, 104, 120, 128, 136, 152, 160, 192, 224, 232, 248, 256, 264, 280, 296, 320, 328,
    344, 384, 392, 400, 416, 448, 456, 480, 488, 504, 512, 520, 536, 568, 600, 632, 640, 648, 680, 704, 728, 744, 760,
    768, 776, 792, 832, 856, 888, 896, 928, 960, 1000, 1024, 1032, 1088, 1112, 1144, 1152, 1208, 1256, 1280, 1344, 1400,
    1416, 1472, 1536, *_ODD,
)  # fmt: skip
_TWELVE_HEADS = (*range(8, 257, 8), *(D for D in _ODD if D < 256))
_BATCHES = (
    1, 2, 3, 4, 6, 8, 9, 12, 14, 15, 16, 17, 20, 24, 25, 28, 32, 33, 40, 42, 43, 48, 49, 56, 57, 58, 64, 65, 72, 80, 81,
    96, 97, 112, 113, 128, 129, 144, 160, 176, 192, 200, 224, 256, 257, 288, 300,
)  # fmt: skip


class Series(NamedTuple):
    """Cases that differ in one field only."""

    title: str
    field: str
    label: str
    tolerance: float  # a case that takes more than this many times as long as a larger one is a cliff
    cases: tuple[Case, ...]


def _over_head_size(N: int, title: str, sizes: tuple[int, ...]) -> Series:
    return Series(title, "D", "head size", 1.08, tuple(replace(_BASE, N=N, D=D) for D in sorted(sizes)))


def _over_batch(N: int, D: int) -> Series:
    return Series(f"{N} × {D}", "B", "batch size", 1.05, tuple(replace(_BASE, N=N, D=D, B=B) for B in _BATCHES))


SERIES = (
    _over_head_size(1, "1 head, batch 16", _ONE_HEAD),
    _over_head_size(12, "12 heads, batch 16", _TWELVE_HEADS),
    _over_batch(1, HIDDEN),
    _over_batch(12, 64),
)
CASES = tuple(dict.fromkeys(case for series in SERIES for case in series.cases))
