"""What an answer may be. Each function makes one kind of value of what the learner gave.

They raise WrongAnswer with what is asked for, so that a check itself sees only values of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ddp_notebook.model import Diagnosis, Ranks, parse_ranks
from ddp_notebook.workshop.check import NOTEBOOK, WrongAnswer

Value = TypeVar("Value")

AS_IT_IS = "leave the cell that checks as it is: it passes all that is needed."


def shown(answer: Any) -> str:
    """An answer as a message quotes it: short, whatever it is."""
    text = repr(answer)
    return text if len(text) <= 60 else f"{text[:57]}..."


def text(answer: Any) -> str:
    """A word or a line, without the space around it."""
    if not isinstance(answer, str):
        raise WrongAnswer(f"a text in quotes is asked for, and {shown(answer)} is none.")
    return answer.strip()


def one_of(*choices: str) -> Callable[[Any], str]:
    """One of these words."""

    def read(answer: Any) -> str:
        word = text(answer)
        if word not in choices:
            words = ", ".join(map(repr, choices))
            raise WrongAnswer(f"{shown(answer)} is none of the choices: {words}.")
        return word

    return read


def number(answer: Any) -> float:
    """A number; one that NumPy or a tensor of a single element holds will do."""
    if isinstance(answer, (bool, str)):
        raise WrongAnswer(f"a number is asked for, and {shown(answer)} is none.")
    try:
        if not isinstance(answer, float) and hasattr(answer, "item"):
            answer = answer.item()  # float() takes no array of one element any more
        return float(answer)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise WrongAnswer(f"a number is asked for, and {shown(answer)} is none.") from None


def whole_number(answer: Any) -> int:
    """A number without a fraction."""
    value = number(answer)
    if not value.is_integer():
        raise WrongAnswer(f"a whole number is asked for, and {shown(answer)} is none.")
    return int(value)


def ranks(world_size: int | None = None) -> Callable[[Any], Ranks]:
    """A rank set: ``"0,2-3"``, a single rank, or a list of ranks; of the notebook's by default."""

    def read(answer: Any) -> Ranks:
        try:
            if isinstance(answer, str):
                return parse_ranks(answer, world_size or NOTEBOOK.world_size)
            each = [answer] if isinstance(answer, int) else list(answer)
        except ValueError as error:
            raise WrongAnswer(str(error)) from None
        except TypeError:
            raise WrongAnswer(
                f"ranks are asked for, such as '0,2-3' or [0, 2, 3], and {shown(answer)} is none."
            ) from None
        return tuple(sorted({whole_number(one) for one in each}))

    return read


def parts(answer: Any, count: int = 2) -> tuple[Any, ...]:
    """What the notebook's own cell passes beside the learner's answer, or with it."""
    if not (isinstance(answer, tuple) and len(answer) == count):
        raise WrongAnswer(AS_IT_IS)
    return answer


def image_numbers(answer: Any) -> Sequence[int]:
    """The numbers of the images that a rank used."""
    if not isinstance(answer, (list, tuple)):
        raise WrongAnswer("the numbers of the images are asked for, as a list.")
    return [whole_number(each) for each in answer]


def by_rank(
    read: Callable[[Any], Value], world_size: int | None = None
) -> Callable[[Any], Mapping[int, Value]]:
    """A value of every rank, as `%ddp_pull` returns them; of the notebook's ranks by default."""

    def read_each(answer: Any) -> Mapping[int, Value]:
        if not isinstance(answer, Mapping):
            raise WrongAnswer(
                f"the values of all ranks are asked for, as %ddp_pull brings them, "
                f"and {shown(answer)} is none."
            )
        everyone = range(world_size or NOTEBOOK.world_size)
        missing = [rank for rank in everyone if rank not in answer]
        if missing:
            raise WrongAnswer(
                f"rank {missing[0]} is not among them: pull the variable from all ranks."
            )
        values = {}
        for rank in everyone:
            try:
                values[rank] = read(answer[rank])
            except WrongAnswer as wrong:
                raise WrongAnswer(f"on rank {rank} {wrong}") from None
        return values

    return read_each


def diagnosis(answer: Any) -> Diagnosis:
    """What `%ddp_why` returns."""
    if not isinstance(answer, Diagnosis):
        raise WrongAnswer(
            f"a diagnosis is asked for: diagnosis = %ddp_why, and {shown(answer)} is none."
        )
    return answer
