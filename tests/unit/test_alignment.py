"""Lists of collectives side by side: who parts from whom, and in what."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from traces import all_reduce, barrier, message, play

from ddp_notebook.diagnosis.collectives.alignment import (
    Alignment,
    RankSequence,
    align_all,
    differences,
)
from ddp_notebook.model import Collective, Collectives, Place


def aligned(*programs: list[Collective], dropped: int = 0) -> Alignment:
    """The default group's alignment of ranks that issued these, whatever met."""
    of = {
        rank: tuple(
            replace(each, rank=rank, number=number, slot=number)
            for number, each in enumerate(program)
        )[dropped if rank == 0 else 0 :]
        for rank, program in enumerate(programs)
    }
    return align_all(Collectives(of))["default"]


A, B, C = all_reduce(5), all_reduce(6), barrier(7)


def test_equal_lists_and_the_beginnings_of_them_agree() -> None:
    found = aligned([A, B, C], [A, B], [], [A])
    assert found.deviations == ()
    assert set(found.sequences) == {0, 1, 3}


def test_one_too_many_is_not_one_missing() -> None:
    (deviation,) = aligned([A, B, C], [A, C], [A, C]).deviations
    assert (deviation.ranks, deviation.others, deviation.sure) == ((0,), (1, 2), True)
    (edit,) = deviation.edits
    assert ([each.path for each in edit.own], edit.other) == ([B.path], ())
    (deviation,) = aligned([A, C], [A, B, C], [A, B, C]).deviations
    (edit,) = deviation.edits
    assert (edit.own, [each.path for each in edit.other]) == ((), [B.path])


def test_two_ranks_have_no_majority() -> None:
    (deviation,) = aligned([A, B], [A, C]).deviations
    assert not deviation.sure
    assert deviation.ranks == (1,)


def test_ranks_that_part_at_different_slots_are_each_voted_on() -> None:
    found = aligned([A, B, C, A], [A, B, C, A], [A, B, C, B], [C, B, C, A], [A, B, C, A])
    assert {deviation.ranks: deviation.sure for deviation in found.deviations} == {
        (3,): True,
        (2,): True,
    }
    assert all(deviation.others == (0, 1, 4) for deviation in found.deviations)


def test_a_slower_rank_has_no_vote_on_what_it_has_not_reached() -> None:
    found = aligned([A, B], [A, C], [A, C], [A], [A])
    assert [(each.ranks, each.others) for each in found.deviations] == [((0,), (1, 2, 3, 4))]


def test_lists_whose_oldest_records_were_dropped_are_compared_from_there() -> None:
    found = aligned([A, B, C, A], [A, B, C, A], dropped=2)
    assert {rank: sequence.first for rank, sequence in found.sequences.items()} == {0: 2, 1: 0}
    assert found.deviations == ()
    (deviation,) = aligned([A, B, C, B], [A, B, C, A], [A, B, C, A], dropped=3).deviations
    assert (deviation.ranks, deviation.edits[0].own_at) == ((0,), 3)


def test_places_are_compared_by_value_and_groups_apart() -> None:
    copy = replace(A, path=(Place("train.py", 5),))
    assert aligned([A], [copy]).deviations == ()
    case = play({0: [A, replace(B, group="g")], 1: [A]}, groups={"g": (0,)})
    assert set(align_all(case.collectives)) == {"default", "g"}


def test_sends_and_receives_are_in_no_sequence() -> None:
    case = play({0: [message("send", 1, 5), A], 1: [A, message("recv", 0, 6)]})
    assert align_all(case.collectives)["default"].deviations == ()


def test_a_gap_in_the_slots_leaves_what_follows_it() -> None:
    records = [replace(A, rank=0, number=i, slot=slot) for i, slot in enumerate((0, 1, 4, 5, 5))]
    sequence = align_all(Collectives({0: tuple(records)}))["default"].sequences[0]
    assert (sequence.first, len(sequence.records), sequence.end) == (4, 2, 6)
    assert sequence.records[-1].number == 4


def _sequence(keys: list[int]) -> RankSequence:
    made = (replace(A, number=i, slot=i, tag=key) for i, key in enumerate(keys))
    return RankSequence(0, 0, tuple(made), tuple(keys))


lists = st.lists(st.integers(0, 3), max_size=40)


@given(lists, lists)
def test_differences_turn_one_list_into_the_other(mine: list[int], theirs: list[int]) -> None:
    own, other = _sequence(mine), _sequence(theirs)
    made: list[int] = []
    at = 0
    for edit in differences(own, other):
        made += theirs[at : edit.other_at]
        made += [each.tag for each in edit.own]
        at = edit.other_at + len(edit.other)
    assert made + theirs[at:] == mine


@given(lists.filter(bool), st.data())
def test_what_is_put_in_or_taken_out_is_all_that_differs(mine: list[int], data: object) -> None:
    draw = data.draw  # type: ignore[attr-defined]
    at = draw(st.integers(0, len(mine) - 1))
    less = mine[:at] + mine[at + 1 :]
    (edit,) = differences(_sequence(mine), _sequence(less))
    assert (len(edit.own), len(edit.other)) == (1, 0)
    (edit,) = differences(_sequence(less), _sequence(mine))
    assert (len(edit.own), len(edit.other)) == (0, 1)


def test_lists_with_nothing_in_common_are_one_edit() -> None:
    mine, theirs = [i % 7 for i in range(5000)], [7 + i % 5 for i in range(5000)]
    (edit,) = differences(_sequence(mine), _sequence(theirs))
    assert (len(edit.own), len(edit.other), edit.last) == (5000, 5000, True)
