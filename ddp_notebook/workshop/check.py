"""`check`: judges an answer to an exercise, and says what is wrong with it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from ddp_notebook.errors import UsageMistake

Answer = TypeVar("Answer")


class WrongAnswer(Exception):
    """Raised for an answer that is not right; the message says what is wrong and where to look."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of `check`; a notebook shows it as one line."""

    exercise: str
    passed: bool
    text: str

    def __repr__(self) -> str:
        return f"{'✓' if self.passed else '✗'} {self.exercise}: {self.text}"


@dataclass(frozen=True, slots=True)
class _Exercise:
    read: Callable[[Any], Any]
    judge: Callable[[Any], str]


_EXERCISES: dict[str, _Exercise] = {}


@dataclass
class Notebook:
    """The facts that checks have of the notebook in which they are called."""

    ranks: Callable[[], int] = lambda: 0
    """How many ranks it has, or had last; 0 where that is not known."""

    @property
    def world_size(self) -> int:
        """The number of ranks that an answer is about: four, as the notebooks are written."""
        return self.ranks() or 4


NOTEBOOK = Notebook()


def exercise(
    name: str, read: Callable[[Any], Answer]
) -> Callable[[Callable[[Answer], str]], Callable[[Answer], str]]:
    """Declare how exercise `name` is judged.

    `read` converts what the learner gave to the kind of value that is asked for, or raises
    WrongAnswer. The function takes that value; it returns what is worth knowing about the right
    answer, and raises WrongAnswer with what is wrong about any other.
    """

    def declare(judge: Callable[[Answer], str]) -> Callable[[Answer], str]:
        if name in _EXERCISES:
            raise ValueError(f"Two checks for exercise {name}.")
        _EXERCISES[name] = _Exercise(read, judge)
        return judge

    return declare


def check(exercise: str, answer: Any = ...) -> Verdict:
    """Is `answer` right for an exercise of the notebooks, such as ``check("2.1", "join/2")``?

    Returns a `Verdict`, which shows as one line: why it is right, or what is wrong with it. The
    solution is not given away. An answer that is still ``...``, in
    part or on a rank, is said to be open.

    Raises UsageMistake when there is no such exercise.
    """
    known, exercise = exercises(), str(exercise).strip()
    if exercise not in known:
        raise UsageMistake(
            f"There is no exercise {exercise!r}. It is the number in the exercise's heading: "
            f"one of {', '.join(known)}."
        )
    if _is_open(answer):
        return Verdict(exercise, False, "still open. Put your answer in place of the dots.")
    asked = _EXERCISES[exercise]
    try:
        return Verdict(exercise, True, asked.judge(asked.read(answer)))
    except WrongAnswer as wrong:
        return Verdict(exercise, False, str(wrong))


def _is_open(answer: Any) -> bool:
    """True for dots, also on a rank, or as a part of the answer."""
    if isinstance(answer, Mapping):
        return any(map(_is_open, answer.values()))
    if isinstance(answer, (tuple, list)):
        return any(map(_is_open, answer))
    return answer is ...


@cache
def exercises() -> tuple[str, ...]:
    """The numbers of all exercises, in the order of the notebooks."""
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")
    return tuple(sorted(_EXERCISES, key=lambda name: tuple(map(int, name.split(".")))))
