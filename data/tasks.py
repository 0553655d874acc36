"""State-tracking tasks: sequences whose labels need a state that is updated at every step.

A new task is one function in this file. It draws tokens [B, T] and their labels [B, T], both int64, where the label of
a position depends on the tokens up to that position alone (so that every prefix is a sample too), or is -100 where the
task asks nothing. For example, the word problem of the symmetric group S3 would multiply its elements up.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

IGNORED = -100  # label of a position that is not scored: torch's ignore_index


@dataclass(frozen=True)
class Task:
    name: str
    vocab_size: int  # tokens are 0 ... vocab_size-1
    num_classes: int  # labels are 0 ... num_classes-1
    draw: Callable[[np.random.Generator, tuple[int, int]], tuple[np.ndarray, np.ndarray]]

    @property
    def chance(self) -> float:
        """Accuracy of guessing."""
        return 1 / self.num_classes

    def check(self) -> None:
        """Draws a few sequences, so that a wrong task fails here with its name, not in an embedding on a GPU."""
        shape = (16, 64)
        tokens, labels = self.draw(np.random.default_rng(0), shape)
        if tokens.shape != shape or labels.shape != shape:
            raise ValueError(f"task {self.name!r} drew shapes {tokens.shape}, {labels.shape} when asked for {shape}")
        labels = labels[labels != IGNORED]
        for kind, values, count in (("token", tokens, self.vocab_size), ("label", labels, self.num_classes)):
            wrong = values[(values < 0) | (values >= count)]
            if wrong.size:
                raise ValueError(f"task {self.name!r} drew the {kind} {wrong[0]}; allowed are 0 ... {count - 1}")


TASKS: dict[str, Task] = {}


def task(vocab_size: int, num_classes: int) -> Callable:
    """Registers the decorated function as a task under its own name."""

    def register(draw: Callable) -> Callable:
        TASKS[draw.__name__] = Task(draw.__name__, vocab_size, num_classes, draw)
        return draw

    return register


def get_task(name: str) -> Task:
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; there are: {', '.join(sorted(TASKS))}")
    return TASKS[name]


@task(vocab_size=2, num_classes=2)
def parity(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Is the number of ones so far odd?"""
    bits = rng.integers(0, 2, shape)
    return bits, bits.cumsum(axis=1) % 2
