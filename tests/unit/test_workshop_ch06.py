"""Notebook 6: the right answers pass, and each wrong one is told what is wrong with it."""

from __future__ import annotations

from typing import Any

import pytest
from answers import assert_right, assert_wrong

ALIKE = {rank: {"one": True, "two": False} for rank in range(4)}
ODD = dict.fromkeys(range(4), 2)
MARK = dict.fromkeys(range(4), "0a1b2c3d")
FIRST = {rank: list(range(rank, 1440, 4)) for rank in range(4)}
SECOND = {rank: FIRST[(rank + 1) % 4][::-1] for rank in range(4)}
SEEN = {rank: FIRST[rank] + SECOND[rank] for rank in range(4)}


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [("6.1", (288, 0.25)), ("6.2", (ALIKE, ODD)), ("6.3", (MARK, SEEN)), ("6.4", "C")],
)
def test_the_right_answer_passes(exercise: str, answer: Any) -> None:
    assert_right(exercise, answer)


@pytest.mark.parametrize(
    ("exercise", "answer", "said"),
    [
        ("6.1", 288, "expected two values, (images, factor)"),
        ("6.1", (36, 0.25), "one micro-batch on one rank"),
        ("6.1", (72, 0.25), "what one rank brings"),
        ("6.1", (144, 0.25), "How many come before a step"),
        ("6.1", (100, 0.25), "Multiply"),
        ("6.1", (float("nan"), 0.25), "Multiply"),
        ("6.1", (288, 4), "upside down"),
        ("6.1", (288, 0.125), "Micro-batches are added up in either case"),
        ("6.2", ALIKE, "leave the cell"),
        ("6.2", (dict.fromkeys(range(4), True), ODD), 'keys "one" and "two"'),
        ("6.2", (ALIKE | {1: {"one": 1, "two": False}}, ODD), "True or False"),
        ("6.2", (ALIKE | {1: {"one": True, "two": True}}, ODD), "rank 1 takes model two"),
        ("6.2", (ALIKE | {3: {"one": False, "two": False}}, ODD), "rank 3 takes model one"),
        ("6.2", (ALIKE, ODD | {0: 1}), "rank 0 says that the odd one is rank 1"),
        ("6.3", SEEN, "leave the cell"),
        ("6.3", (MARK | {1: "ffff"}, SEEN), "2 different models"),
        ("6.3", (MARK, dict.fromkeys(range(4), list(range(1440)) * 2)), "divide the data"),
        ("6.3", (MARK, dict.fromkeys(range(4), FIRST[0] + SECOND[0])), "some twice"),
        ("6.3", (MARK, {r: FIRST[r] * 2 for r in range(4)}), "the same order"),
        ("6.3", (MARK, dict.fromkeys(range(4), 3)), "as a list"),
        ("6.4", "A", "set_epoch"),
        ("6.4", "B", "learning rate"),
    ],
)
def test_a_wrong_answer_is_told_what_is_wrong(exercise: str, answer: Any, said: str) -> None:
    assert_wrong(exercise, answer, said)
