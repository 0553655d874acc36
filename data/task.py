"""State-tracking tasks, and the registry of tasks by name."""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np

from flashrnn.imports import imported

IGNORE = -100  # label of a position that is not scored, PyTorch's ignore_index


@dataclass(frozen=True)
class Task:
    """A task: random sequences of tokens with labels at some positions.

    `draw` takes a random generator and a shape [B, T], and returns tokens and labels of this shape, both int64. The
    label of a position is IGNORE, or depends only on the tokens up to that position.
    """

    name: str  # name under which results are stored
    vocab_size: int  # tokens are 0 ... vocab_size - 1
    num_classes: int  # labels are 0 ... num_classes - 1
    draw: Callable[[np.random.Generator, tuple[int, int]], tuple[np.ndarray, np.ndarray]]
    shortest: int = 1  # every sequence has a label within this number of positions

    @property
    def chance(self) -> float:
        """The accuracy of a random guess."""
        return 1 / self.num_classes

    def check(self) -> None:
        """Draw a few sequences; raise ValueError for a wrong shape, dtype, token or label."""
        shape = (16, 64)
        drawn = self.draw(np.random.default_rng(0), shape)
        if not (isinstance(drawn, tuple) and [type(part) for part in drawn] == [np.ndarray] * 2):
            raise ValueError(f"task {self.name!r} drew {type(drawn).__name__}: expected (tokens, labels), NumPy arrays")
        tokens, labels = drawn
        if tokens.shape != shape or labels.shape != shape:
            raise ValueError(f"task {self.name!r} drew shapes {tokens.shape}, {labels.shape} when asked for {shape}")
        labels = labels[labels != IGNORE]
        for kind, values, count in (("token", tokens, self.vocab_size), ("label", labels, self.num_classes)):
            if values.dtype.kind not in "iub":  # other dtypes would be truncated to integers without an error
                raise ValueError(f"task {self.name!r} drew {kind}s of dtype {values.dtype}: expected integers")
            wrong = values[(values < 0) | (values >= count)]
            if wrong.size:
                raise ValueError(f"task {self.name!r} drew the {kind} {wrong[0]}; allowed are 0 ... {count - 1}")


TASKS: dict[str, Task] = {}


def task(vocab_size: int, num_classes: int, shortest: int = 1) -> Callable[[Callable], Task]:
    """Turn the decorated function `draw` into a task, registered under the name of the function.

    Args:
        vocab_size: number of tokens.
        num_classes: number of labels.
        shortest: every sequence has a label within this number of positions.

    Raises:
        ValueError: a task of another module has the same name, under which results are stored.
    """

    def register(draw: Callable) -> Task:
        made = Task(draw.__name__, vocab_size, num_classes, draw, shortest)
        if made.name in TASKS and (module := TASKS[made.name].draw.__module__) != draw.__module__:
            raise ValueError(
                f"the name {made.name!r} is taken by a task of {module}: give that of {draw.__module__} another name"
            )
        draw.__qualname__ += ".draw"  # lets pickle find it, for processes that load data
        TASKS[made.name] = made
        return made

    return register


FAMILIES: dict[str, Callable[..., Task]] = {}


def task_family(make: Callable[..., Task]) -> Callable[..., Task]:
    """Register a function that returns a task; its arguments are options of `data` in a config."""
    FAMILIES[make.__name__] = make
    return make


def get_task(name: str, **options: Any) -> Task:
    """Return a registered task, the task that "module.name" refers to, or a task of a family with these options.

    Raises:
        ValueError: there is no such task, or it does not accept these options.
    """
    if name in FAMILIES:
        try:
            signature(FAMILIES[name]).bind(**options)
        except TypeError as error:
            takes = ", ".join(signature(FAMILIES[name]).parameters)
            raise ValueError(f"task {name!r} takes the options {takes}: {error}") from error
        return FAMILIES[name](**options)
    if options:
        raise ValueError(f"task {name!r} has no option {', '.join(options)}; tasks with options: {', '.join(FAMILIES)}")
    if "." in name:
        return imported(name, Task, "data.tasks.Task, which the decorator @task makes of a function")
    if name not in TASKS:
        known = ", ".join(sorted([*TASKS, *FAMILIES]))
        raise ValueError(f"unknown task {name!r}; there are: {known}. One of your own is named as module.name")
    return TASKS[name]
