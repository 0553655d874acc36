"""The measured cases, which are cells and sizes, in suites. It imports nothing slow, so that `--help` is fast."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

FORWARD, TRAINING = "forward", "forward+backward"
MODES = (FORWARD, TRAINING)


@dataclass(frozen=True)
class Case:
    """A cell and the sizes of a call."""

    function: str
    N: int  # heads
    D: int  # head size
    B: int  # batch
    T: int = 1024  # time steps
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"{self.function}-{self.N}x{self.D}-B{self.B}-T{self.T}-{self.dtype}"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that `flashrnn.flashrnn` takes."""
        from flashrnn import get_cell

        cell = get_cell(self.function)
        return {
            "Wx": (self.B, self.T, len(cell.input_gates), self.N, self.D),
            "R": (len(cell.recurrent_gates), self.N, self.D, self.D),
            "b": (len(cell.gates), self.N, self.D),
        }


class Job(NamedTuple):
    """A measurement of a case, without gradients (FORWARD) or with those of Wx, R and b (TRAINING)."""

    case: Case
    mode: str


HIDDEN = 768
_BOTH = ((12, 64), (1, HIDDEN))
_SWEPT = ("lstm", "slstm")
SUITES: dict[str, tuple[Case, ...]] = {
    "main": (
        *(Case("lstm", 12, 64, B) for B in (16, 32, 64)),
        *(Case("lstm", HIDDEN // D, D, 16) for D in (16, 32, 128, 256)),
        *(Case("lstm", 1, HIDDEN, B) for B in (16, 32, 64)),
        *(Case(function, *heads, 16) for function in ("slstm", "gru", "elman") for heads in _BOTH),
    ),
    "heads": tuple(Case(name, HIDDEN // D, D, 16) for name in _SWEPT for D in (16, 32, 64, 128, 256, 384, HIDDEN)),
    "batch": tuple(Case(name, *heads, 2**k) for name in _SWEPT for heads in _BOTH for k in range(1, 9)),
    "backends": (
        *(Case("lstm", HIDDEN // D, D, 16) for D in (16, 32, 64, 128, HIDDEN)),
        *(Case("lstm", N, D, 16) for N, D in ((1, 1024), (1, 2048), (4, 2048), (1, 4096))),
    ),
    "length": tuple(Case(name, *heads, 16, 2**k) for name in _SWEPT for heads in _BOTH for k in range(8, 14)),
    "short": tuple(Case(name, *heads, 16, T) for name in _SWEPT for heads in _BOTH for T in (1, 4, 16, 64)),
}


SWEEPS = {
    "heads": ("D", "head size"),
    "batch": ("B", "batch size"),
    "length": ("T", "time steps"),
    "short": ("T", "time steps"),
}
"""The field of a case that a suite varies, and what it is."""


def network(case: Case, field: str) -> str:
    """Return a label with the cell and those of its sizes that a sweep over `field` does not change."""
    heads = f"{case.N * case.D} units" if field == "D" else f"{case.N} × {case.D}"
    return f"{case.function} {heads}"


def select(suite: str, patterns: Sequence[str]) -> list[Case]:
    """Return the suite's cases whose names match a shell pattern; all of them without patterns."""
    if suite not in SUITES:
        raise ValueError(f"suite={suite}: expected one of {', '.join(SUITES)}")
    return matching(SUITES[suite], patterns, f"suite {suite!r}")


def matching(cases: Sequence[Case], patterns: Sequence[str], where: str) -> list[Case]:
    """Return those of the cases whose names match a shell pattern; all of them without patterns."""
    for pattern in patterns:
        if not any(fnmatchcase(case.name, pattern) for case in cases):
            names = "\n  ".join(case.name for case in cases)
            raise ValueError(f"no case of {where} matches {pattern!r}; its cases are\n  {names}")
    return [case for case in cases if not patterns or any(fnmatchcase(case.name, pattern) for pattern in patterns)]
