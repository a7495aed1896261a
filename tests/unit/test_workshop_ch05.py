"""Notebook 5: the right answers pass, and each wrong one is told what is wrong with it."""

from __future__ import annotations

from typing import Any

import pytest
from answers import assert_right, assert_wrong

STUCK = {"A": "slow", "B": "stuck", "C": "stuck"}
RING = {rank: float((rank - 1) % 4) for rank in range(4)}


def shares(steps: int = 10, size: int = 360) -> tuple[dict[int, int], dict[int, list[int]]]:
    """The same number of steps on every rank, and `size` images of its own for each."""
    used = {rank: list(range(rank * size, (rank + 1) * size)) for rank in range(4)}
    return dict.fromkeys(range(4), steps), used


def without(answer: tuple[dict[int, int], dict[int, list[int]]], rank: int, **changes: Any) -> Any:
    """The answer with other values on one rank."""
    steps, used = answer
    return {**steps, rank: changes.get("steps", steps[rank])}, {
        **used,
        rank: changes.get("used", used[rank]),
    }


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        ("5.1", STUCK),
        ("5.2", RING),
        ("5.3", "0"),
        ("5.3", 0),
        ("5.4", (3, 12)),
        ("5.4", (3, 11)),
        ("5.5", shares()),
    ],
)
def test_the_right_answer_passes(exercise: str, answer: Any) -> None:
    assert_right(exercise, answer)


@pytest.mark.parametrize(
    ("exercise", "answer", "said"),
    [
        ("5.1", "stuck", 'keys "A", "B" and "C"'),
        ("5.1", {**STUCK, "A": "stuck"}, "its variable grows"),
        ("5.1", {**STUCK, "B": "slow"}, "Which of them is to come first"),
        ("5.1", {**STUCK, "C": "slow"}, "nothing more to do"),
        ("5.1", {**STUCK, "C": "late"}, "not one of the choices"),
        ("5.2", {rank: float(rank) for rank in range(4)}, "its own block"),
        ("5.2", {**RING, 3: 0.0}, "rank 3 has 0, and the block of rank 2"),
        ("5.3", "1-3", "Whose collective has no partner"),
        ("5.3", "all", "do not all do the same"),
        ("5.3", "2", "what has rank 2 done"),
        ("5.4", 3, "expected two values, (rank, line), got 3."),
        ("5.4", (7, 12), "the ranks are 0 to 3"),
        ("5.4", (0, 12), "Who does not"),
        ("5.4", (3, 5), "where the others wait"),
        ("5.4", (3, 17), "no mistake"),
        ("5.4", (3, 1), "all ranks do the same"),
        ("5.5", shares()[0], "leave the cell that checks"),
        ("5.5", without(shares(), 2, steps=9, used=[]), "9 on rank 2"),
        ("5.5", shares(11, 375), "a batch was not of 36"),
        ("5.5", without(shares(), 1, used=list(range(360))), "the shares overlap"),
        ("5.5", without(shares(), 1, used=list(range(9000, 9360))), "no image"),
        ("5.5", shares(9, 324), "204 images are left out"),
        ("5.5", without(shares(), 1, used=3), "as a list"),
    ],
)
def test_a_wrong_answer_is_told_what_is_wrong(exercise: str, answer: Any, said: str) -> None:
    assert_wrong(exercise, answer, said)
