"""`check`: what it says of answers, whatever they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_notebook.errors import UsageMistake
from ddp_notebook.workshop import check
from ddp_notebook.workshop.answers import (
    by_rank,
    diagnosis,
    number,
    one_of,
    ranks,
    text,
    whole_number,
)
from ddp_notebook.workshop.check import WrongAnswer, exercise, exercises

READERS: list[Callable[[Any], Any]] = [
    by_rank(number),
    diagnosis,
    number,
    one_of("a", "b"),
    ranks(),
    text,
    whole_number,
]
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.integers() | st.text(), inner),
    max_leaves=5,
)


def test_dots_are_an_open_exercise() -> None:
    for name in exercises():
        verdict = check(name)
        assert not verdict.passed
        assert repr(verdict).startswith(f"✗ {name}: still open.")


def test_an_exercise_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(UsageMistake, match=r"There is no exercise '99\.1'"):
        check("99.1", 3)


def test_two_checks_for_one_exercise_are_a_mistake() -> None:
    name = exercises()[0]
    with pytest.raises(ValueError, match="Two checks"):
        exercise(name, text)(lambda answer: "")


@given(anything)
def test_no_answer_breaks_a_check(answer: Any) -> None:
    for name in exercises():
        assert check(name, answer).text


@pytest.mark.parametrize("read", READERS)
@given(answer=anything)
def test_what_is_no_answer_is_said_to_be_none(read: Callable[[Any], Any], answer: Any) -> None:
    try:
        read(answer)
    except WrongAnswer as wrong:
        assert str(wrong)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("0,2-3", (0, 2, 3)), (2, (2,)), ([3, 1], (1, 3)), ({1}, (1,)), ("all", (0, 1, 2, 3))],
)
def test_ranks_are_written_in_many_ways(answer: Any, expected: tuple[int, ...]) -> None:
    assert ranks()(answer) == expected


def test_the_rank_whose_value_is_no_answer_is_named() -> None:
    with pytest.raises(WrongAnswer, match="on rank 2: expected a number, got 'x'"):
        by_rank(number)({0: 1, 1: 1, 2: "x", 3: 1})
    with pytest.raises(WrongAnswer, match="rank 3 is not among them"):
        by_rank(number)({0: 1, 1: 1, 2: 1})
