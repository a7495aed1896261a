"""The kinds of answers. Each function converts what the learner gave to one kind of value.

They raise WrongAnswer with what is asked for, so that a check itself sees only values of its kind.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ddp_notebook.model import Diagnosis, Ranks, parse_ranks
from ddp_notebook.workshop.check import NOTEBOOK, WrongAnswer

Value = TypeVar("Value")
Other = TypeVar("Other")

AS_IT_IS = "leave the cell that checks as it is: it passes all that is needed."


def shown(answer: Any) -> str:
    """An answer as a message quotes it: short, whatever it is."""
    text = repr(answer)
    return text if len(text) <= 60 else f"{text[:57]}..."


def text(answer: Any) -> str:
    """A word or a line, without the space around it; bytes, as a store has, will do."""
    if isinstance(answer, bytes):
        answer = answer.decode(errors="replace")
    if not isinstance(answer, str):
        raise WrongAnswer(f"expected a text in quotes, got {shown(answer)}.")
    return answer.strip()


def _plain(words: str) -> str:
    """Words without what does not matter: case, hyphens, spaces, a full stop."""
    return re.sub(r"[\W_]+", " ", words.casefold()).strip()


def one_of(*choices: str) -> Callable[[Any], str]:
    """One of these words, however it is spaced and whatever its case."""
    by_words = {_plain(choice): choice for choice in choices}

    def read(answer: Any) -> str:
        word = by_words.get(_plain(text(answer)))
        if word is None:
            words = ", ".join(map(repr, choices))
            raise WrongAnswer(f"{shown(answer)} is not one of the choices: {words}.")
        return word

    return read


_YES_OR_NO = {"true": True, "yes": True, "false": False, "no": False}


def yes_or_no(answer: Any) -> bool:
    """True or False; NumPy's, or a tensor's, or the word will do."""
    if isinstance(answer, str) and (word := _plain(answer)) in _YES_OR_NO:
        return _YES_OR_NO[word]
    try:
        value = answer.item() if hasattr(answer, "item") else answer
    except (ValueError, RuntimeError):
        value = None  # of many elements
    if not isinstance(value, bool):
        raise WrongAnswer(f"expected True or False, got {shown(answer)}.")
    return value


_BEFORE = re.compile(r"^\s*(?:rank|line|step)?[\s=:]*", re.IGNORECASE)


def number(answer: Any) -> float:
    """A number, also as a text such as ``1/4``, ``75 %`` or ``line 12``.

    It may be the only element of a list, an array or a tensor.
    """
    value = answer
    try:
        if isinstance(value, str):
            value, percent, _ = _BEFORE.sub("", value).rstrip().partition("%")
            value, _, divisor = value.partition("/")
            return float(value) / float(divisor or 1) / (100 if percent else 1)
        if isinstance(value, (list, tuple)):
            (value,) = value
        if isinstance(value, bool):
            raise TypeError
        if not isinstance(value, float) and hasattr(value, "item"):
            value = value.item()  # float() takes no array of one element any more
        return float(value)
    except (TypeError, ValueError, ArithmeticError, RuntimeError):
        raise WrongAnswer(f"expected a number, got {shown(answer)}.") from None


def near(value: float, wanted: float, share: float = 0.02) -> bool:
    """True when they are the same but for rounding."""
    return math.isfinite(value) and abs(value - wanted) <= share * abs(wanted)


def whole_number(answer: Any) -> int:
    """A number without a fraction."""
    value = number(answer)
    if not value.is_integer():
        raise WrongAnswer(f"expected a whole number, got {shown(answer)}.")
    return int(value)


def number_in(*units: str) -> Callable[[Any], float]:
    """A number, also as a text with one of these units behind it: ``"2 MB"``."""
    unit = re.compile(rf"\s*(?:{'|'.join(map(re.escape, units))})\s*$", re.IGNORECASE)

    def read(answer: Any) -> float:
        return number(unit.sub("", answer) if isinstance(answer, str) else answer)

    return read


def _number_of(kind: str) -> Callable[[Any], int]:
    """A whole number, also as a text with what it is the number of, which must be `kind`."""

    def read(answer: Any) -> int:
        before = _BEFORE.match(answer) if isinstance(answer, str) else None
        named = before[0].strip(" \t=:").casefold() if before else ""
        if named not in ("", kind):
            raise WrongAnswer(f"expected a {kind}, got {shown(answer)}.")
        return whole_number(answer)

    return read


a_rank = _number_of("rank")
"""The number of a rank: ``2``, or ``"rank 2"``, and not ``"line 2"``."""
a_line = _number_of("line")


_BETWEEN_RANKS = re.compile(r"[\s,;&()\[\]{}]+|\bands?\b|\branks?\b")


def ranks(world_size: int | None = None) -> Callable[[Any], Ranks]:
    """A rank set: ``"0,2-3"``, a single rank, or a list of ranks; of the notebook's by default."""

    def read(answer: Any) -> Ranks:
        if isinstance(answer, str):
            words = _BETWEEN_RANKS.sub(" ", re.sub(r"\s*-\s*", "-", answer.casefold()))
            try:
                return parse_ranks(",".join(words.split()), world_size or NOTEBOOK.world_size)
            except ValueError as error:
                raise WrongAnswer(str(error)) from None
        try:
            several = list(answer)
        except TypeError:
            several = [answer]
        try:
            return tuple(sorted({whole_number(one) for one in several}))
        except WrongAnswer:
            raise WrongAnswer(
                f"expected ranks, such as '0,2-3' or [0, 2, 3], got {shown(answer)}."
            ) from None

    return read


def parts(answer: Any, count: int = 2) -> tuple[Any, ...]:
    """Return what the notebook's own cell passes beside the learner's answer, or with it."""
    if not (isinstance(answer, tuple) and len(answer) == count):
        raise WrongAnswer(AS_IT_IS)
    return answer


def with_passed(
    read: Callable[[Any], Value], read_passed: Callable[[Any], Other]
) -> Callable[[Any], tuple[Value, Other]]:
    """The learner's answer, and one value that the notebook's own cell passes with it."""

    def read_both(answer: Any) -> tuple[Value, Other]:
        own, passed = parts(answer)
        return read(own), read_passed(passed)

    return read_both


def two(
    what: str, read: Callable[[Any], Value], read_second: Callable[[Any], Other]
) -> Callable[[Any], tuple[Value, Other]]:
    """Two values in their order; `what` is how they are asked for: ``(rank, line)``.

    A text will do, with a comma between them.
    """

    def read_both(answer: Any) -> tuple[Value, Other]:
        if isinstance(answer, str):
            answer = [value.strip(" '\"") for value in answer.strip(" ()[]").split(",")]
        if not (isinstance(answer, (tuple, list)) and len(answer) == 2):
            raise WrongAnswer(f"expected two values, {what}, got {shown(answer)}.")
        return read(answer[0]), read_second(answer[1])

    return read_both


def image_numbers(answer: Any) -> Sequence[int]:
    """The numbers of the images that a rank used."""
    images = answer.tolist() if hasattr(answer, "tolist") else answer
    if not isinstance(images, (list, tuple)):
        raise WrongAnswer("the numbers of the images are asked for, as a list.")
    return [whole_number(image) for image in images]


def by_rank(
    read: Callable[[Any], Value], world_size: int | None = None
) -> Callable[[Any], Mapping[int, Value]]:
    """A value of every rank, as `%ddp_pull` returns them; of the notebook's ranks by default.

    A list of as many values will do: they are the ranks' in their order.
    """

    def read_each(answer: Any) -> Mapping[int, Value]:
        count = world_size or NOTEBOOK.world_size
        if isinstance(answer, (list, tuple)) and len(answer) == count:
            answer = dict(enumerate(answer))
        if not isinstance(answer, Mapping):
            raise WrongAnswer(
                f"expected the values of all ranks, as %ddp_pull brings them, got {shown(answer)}."
            )
        everyone = range(count)
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
                raise WrongAnswer(f"on rank {rank}: {wrong}") from None
        return values

    return read_each


def diagnosis(answer: Any) -> Diagnosis:
    """Return the answer if it is what `%ddp_why` returns."""
    if not isinstance(answer, Diagnosis):
        raise WrongAnswer(f"expected a diagnosis (diagnosis = %ddp_why), got {shown(answer)}.")
    return answer
