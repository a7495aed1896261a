"""The exercises of notebook 1: the right answers pass, wrong ones are told what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from answers import assert_right, assert_wrong

LOSSES = {0: [2.3, 0.1], 1: [2.5, 0.2], 2: [2.1, 9.0], 3: [2.2]}


def everywhere(value: Any) -> dict[int, Any]:
    return dict.fromkeys(range(4), value)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("1.1", everywhere(1.5)),
        ("1.2", 16),
        ("1.2", 16.0),
        ("1.3", (1, LOSSES)),
        ("1.3", (3, everywhere([1.0]))),
    ],
)
def test_the_right_answer_passes(name: str, answer: Any) -> None:
    assert_right(name, answer)


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("1.1", everywhere(6), "which is the sum"),
        ("1.1", {rank: rank for rank in range(4)}, "its own number alone"),
        ("1.1", {rank: rank / 4 for rank in range(4)}, "its own number alone"),
        ("1.1", everywhere(24), "once"),
        ("1.1", everywhere(None), "on rank 0: expected a number"),
        ("1.2", 4, "the number per rank"),
        ("1.2", 90, "how many steps"),
        ("1.2", 1440, "How many ranks are there"),
        ("1.3", (2, LOSSES), "3 of the others began with more"),
        ("1.3", (7, LOSSES), "there is no rank 7"),
        ("1.3", (0, {0: 1}), "rank 1 is not among them"),
        ("1.3", (0, everywhere([])), "a list of losses"),
        ("1.3", 0, "leave the cell"),
    ],
)
def test_a_wrong_answer_is_told_what_is_wrong(name: str, answer: Any, said: str) -> None:
    assert_wrong(name, answer, said)
