"""Healthy runs are left alone in whatever moment they are looked at, and one mistake is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from traces import BUSY, all_reduce, backward, barrier, constructor, forward, message, op, play

from ddp_notebook.diagnosis import diagnose_run
from ddp_notebook.model import (
    DEFAULT_GROUP,
    Case,
    Category,
    Collective,
    Collectives,
    Ranks,
)


def blamed(case: Case) -> list[tuple[Category, Ranks]]:
    """Who is blamed for what; who is only late is not."""
    return [(f.category, f.ranks) for f in diagnose_run(case).findings if not f.passing]


CALLS: tuple[Callable[[int], Collective], ...] = (
    lambda line: all_reduce(line),
    lambda line: all_reduce(line, shape=(line % 3 + 1,)),
    lambda line: barrier(line),
    lambda line: barrier(900, (line, "save")),
    lambda line: op("broadcast", line, root=0),
    lambda line: op("all_gather", line, shape=(line % 2 + 3, 2)),
    lambda line: backward(line),
    lambda line: forward(line),
    lambda line: all_reduce(line, group="pair"),
    lambda line: all_reduce(line, label=f"metric {line}"),
)


@st.composite
def programs(draw: st.DrawFn) -> list[Collective]:
    """What every rank of a healthy program does: straight pieces and loops."""
    program: list[Collective] = constructor() if draw(st.booleans()) else []
    for piece in range(draw(st.integers(1, 4))):
        lines = [20 + 10 * piece + i for i in range(draw(st.integers(1, 4)))]
        body = [draw(st.sampled_from(CALLS))(line) for line in lines]
        program += body * draw(st.integers(1, 4))
    return program


def of_rank(rank: int, program: Sequence[Collective]) -> list[Collective]:
    """What one rank does of it: the group of a pair is ranks 0 and 1 only."""
    return [each for each in program if rank < 2 or each.group == DEFAULT_GROUP]


@given(programs(), st.integers(2, 5), st.data())
@settings(deadline=None)
def test_ranks_that_are_at_different_places_of_one_program_are_left_alone(
    program: list[Collective], size: int, data: Any
) -> None:
    of = {rank: of_rank(rank, program) for rank in range(size)}
    stops = {rank: data.draw(st.integers(0, len(of[rank]))) for rank in of}
    short = {rank: own[: stops[rank]] for rank, own in of.items()}
    ends = {rank: BUSY for rank in of if stops[rank] < len(of[rank])}
    assert blamed(play(short, ends, {"pair": (0, 1)})) == []


@given(programs(), st.integers(2, 4), st.data())
@settings(deadline=None)
def test_a_picture_whose_ranks_were_asked_at_different_moments_proves_nothing(
    program: list[Collective], size: int, data: Any
) -> None:
    of = {rank: of_rank(rank, program) for rank in range(size)}
    moments = [
        play(of, groups={"pair": (0, 1)}, rounds=data.draw(st.integers(0, 2 * len(program) + 2)))
        for _ in range(size)
    ]
    mixed = Case(
        tuple(moments[rank].ranks[rank] for rank in range(size)),
        collectives=Collectives(
            {rank: moments[rank].collectives.of[rank] for rank in range(size)},
            moments[0].collectives.groups,
        ),
    )
    assert blamed(mixed) == []


@given(st.integers(2, 5), st.integers(1, 6), st.integers(0, 20))
def test_a_ring_of_messages_in_the_right_order_is_left_alone(
    size: int, times: int, rounds: int
) -> None:
    def of(rank: int) -> list[Collective]:
        after, before = (rank + 1) % size, (rank - 1) % size
        both = [message("send", after, 5), message("recv", before, 6)]
        return (both if rank else both[::-1]) * times

    assert blamed(play({rank: of(rank) for rank in range(size)}, rounds=rounds)) == []


@given(programs(), st.integers(3, 5), st.data())
@settings(deadline=None)
def test_one_collective_left_out_on_one_rank_of_three_or_more_names_that_rank(
    program: list[Collective], size: int, data: Any
) -> None:
    program = [each for each in program if each.group == DEFAULT_GROUP]
    assume(program)
    odd = data.draw(st.integers(0, size - 1))
    at = data.draw(st.integers(0, len(program) - 1))
    of = {rank: list(program) for rank in range(size)}
    del of[odd][at]
    assert {ranks for _, ranks in blamed(play(of))} == {(odd,)}


@given(programs(), st.integers(3, 5), st.data())
@settings(deadline=None)
def test_one_collective_too_many_on_one_rank_of_three_or_more_names_that_rank(
    program: list[Collective], size: int, data: Any
) -> None:
    program = [each for each in program if each.group == DEFAULT_GROUP]
    odd = data.draw(st.integers(0, size - 1))
    at = data.draw(st.integers(0, len(program)))
    of = {rank: list(program) for rank in range(size)}
    of[odd].insert(at, data.draw(st.sampled_from(CALLS[:5]))(500))
    assert {ranks for _, ranks in blamed(play(of))} == {(odd,)}


@given(programs(), st.integers(3, 5), st.data())
@settings(deadline=None)
def test_two_collectives_swapped_on_one_rank_of_three_or_more_name_that_rank(
    program: list[Collective], size: int, data: Any
) -> None:
    program = [each for each in program if each.group == DEFAULT_GROUP]
    assume(len(program) > 1)
    odd = data.draw(st.integers(0, size - 1))
    at = data.draw(st.integers(0, len(program) - 2))
    first, second = program[at : at + 2]
    assume(first.path != second.path)
    assume(not first.operation == second.operation == "barrier")
    of = {rank: list(program) for rank in range(size)}
    of[odd][at : at + 2] = [second, first]
    assert {ranks for _, ranks in blamed(play(of))} == {(odd,)}


@given(programs(), st.permutations(range(4)), st.data())
@settings(deadline=None)
def test_other_numbers_for_the_ranks_give_the_same_findings_for_the_same_ranks(
    program: list[Collective], order: list[int], data: Any
) -> None:
    program = [each for each in program if each.group == DEFAULT_GROUP]
    assume(program)
    at = data.draw(st.integers(0, len(program) - 1))
    of = {rank: list(program) for rank in range(4)}
    change = data.draw(st.sampled_from(["less", "more", "shape"]))
    if change == "less":
        del of[3][at]
    elif change == "more":
        of[3].insert(at, all_reduce(500))
    else:
        of[3][at] = replace(of[3][at], shape=(77,), numel=77)
    moved = {order[rank]: own for rank, own in of.items()}
    moved = dict(sorted(moved.items()))
    renamed = [
        (category, tuple(sorted(order[rank] for rank in ranks)))
        for category, ranks in blamed(play(of))
    ]
    assert sorted(renamed) == sorted(blamed(play(moved)))
