"""An all_to_all in which two ranks do not agree how much one sends to the other: whose doing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from collective_cases import found, same, the_one
from traces import op, places, play

from ddp_notebook.model import Case, Splits

STEP = op("all_to_all_single", 33)
EVEN = ((2, 2, 2), (2, 2, 2), ())


def brought(*rows: tuple[tuple[int, ...], ...]) -> Case:
    """Ranks that bring these splits (sends, receives, announced) to their second all_to_all."""
    case = play(same(len(rows), [STEP, STEP]))
    ranks = tuple(
        replace(e, splits=Splits("default", 1, *row))
        for e, row in zip(case.ranks, rows, strict=True)
    )
    return replace(case, ranks=ranks)


CASES = {
    "it announced other counts before": (
        [((2, 2, 2), (2, 10, 2), (2, 2, 2)), ((6, 2, 2), (2, 2, 2), (10, 2, 2)), EVEN],
        (1,),
    ),
    "it expects other counts than were announced": (
        [((2, 2, 2), (2, 9, 2), (2, 2, 2)), ((2, 2, 2), (2, 2, 2), (2, 2, 2)), EVEN],
        (0,),
    ),
    "it does not agree with two others": (
        [((5, 5, 5), (5, 2, 2)), EVEN, EVEN],
        (0,),
    ),
    "its splits are unlike those of the others": ([EVEN, EVEN, ((2, 3, 2), (2, 2, 2))], (2,)),
    "as many rows, of which its are longer": (
        [((1, 1, 1), (1, 1, 1), (), (width, width)) for width in (64, 80, 64)],
        (1,),
    ),
    "each expects what it sends, and one of three pairs agrees by chance": (
        [((9, 4, 7), (9, 4, 7)), ((4, 8, 2), (4, 8, 2)), ((6, 5, 1), (6, 5, 1))],
        (0, 1, 2),
    ),
    "two ranks, of which either may be right": ([((1, 3), (1, 1)), ((1, 1), (1, 1))], (0, 1)),
}


@pytest.mark.parametrize(("rows", "ranks"), CASES.values(), ids=CASES)
def test_splits_that_disagree(
    rows: list[tuple[tuple[int, ...], ...]], ranks: tuple[int, ...]
) -> None:
    assert found(brought(*rows)) == [("split-mismatch", ranks)]


def test_who_sends_what_to_whom_is_said() -> None:
    finding = the_one(brought(*CASES["its splits are unlike those of the others"][0]))
    assert finding.cause == (
        "rank 2 sends 3 to rank 1, which expects 2, in all_to_all at train.py, line 33, "
        "and its splits "
        "are unlike the other ranks'"
    )
    assert "rank 2: sends [2, 3, 2], expects [2, 2, 2]" in finding.evidence


HEALTHY = {
    "uneven and agreed": [((0, 3), (0, 1)), ((1, 5), (3, 5))],
    "the same": [EVEN, EVEN, EVEN],
    "as many elements in other rows": [
        ((4, 4), (2, 2), (), (8, 16)),
        ((2, 2), (2, 2), (), (16, 16)),
    ],
    "of another size than the group": [((2, 2), (2, 2)), ((1, 1), (1, 1)), EVEN],
}


@pytest.mark.parametrize("rows", HEALTHY.values(), ids=HEALTHY)
def test_splits_that_agree_are_left_alone(rows: list[tuple[tuple[int, ...], ...]]) -> None:
    assert found(brought(*rows)) == []


def test_splits_of_other_collectives_are_not_compared() -> None:
    case = brought(((1, 3), (1, 1)), ((1, 1), (1, 1)))
    later = replace(case.ranks[1], splits=Splits("default", 2, (1, 1), (1, 1)))
    assert found(replace(case, ranks=(case.ranks[0], later))) == []


def test_splits_of_other_lines_are_not_compared() -> None:
    """One rank is in the way out, the other still in the way back: neither is wrong about sizes."""
    case = brought(((1, 3), (1, 1)), ((1, 1), (1, 1)))
    assert found(case) == [("split-mismatch", (0, 1))]
    of = dict(case.collectives.of)
    of[1] = (of[1][0], replace(of[1][1], path=places(52)))
    case = replace(case, collectives=replace(case.collectives, of=of))
    assert "split-mismatch" not in [category for category, _ in found(case)]


def test_splits_that_agree_at_two_lines_of_a_forward_are_left_alone() -> None:
    """Out and back, each at a line of its own, as a healthy layer of experts does it."""
    out, back = op("all_to_all_single", 33), op("all_to_all_single", 52)
    case = play(same(2, [out, back]))
    rows = {0: ((1, 3), (1, 2)), 1: ((2, 5), (3, 5))}
    ranks = tuple(replace(e, splits=Splits("default", 1, *rows[e.rank])) for e in case.ranks)
    assert found(replace(case, ranks=ranks)) == []
