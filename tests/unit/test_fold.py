"""State is a fold over events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from ddp_notebook.model import (
    CellFinished,
    CellStarted,
    Event,
    EventsLost,
    Limited,
    Pulse,
    RankExited,
    RankSpawned,
    RankState,
    Snapshot,
    Stage,
    StageFailed,
    StageFinished,
    StageStarted,
    Status,
    exit_text,
)
from ddp_notebook.model.fold import fold
from ddp_notebook.views.board_rows import board, describe, headline, notes


def session(world_size: int) -> Snapshot:
    return Snapshot(ranks=tuple(RankState(rank) for rank in range(world_size)))


def life(rank: int, pid: int = 100) -> list[Event]:
    """A healthy rank from its start to the end of its first cell."""
    events: list[Event] = [RankSpawned(rank=rank, pid=pid, device="cpu")]
    for stage in Stage:
        events.append(StageStarted(rank=rank, stage=stage))
        events.append(StageFinished(rank=rank, stage=stage))
    events.append(CellStarted(rank=rank, cell=1))
    events.append(Pulse(rank=rank, doing="all_reduce (cell 1, line 2)", cell=1))
    events.append(CellFinished(rank=rank, cell=1, outcome="ok"))
    return events


def test_a_rank_is_ready_when_its_all_reduce_is_verified() -> None:
    snapshot = fold(session(1), life(0)[:-3])
    assert snapshot.ready
    assert snapshot.ranks[0].stage is Stage.VERIFIED


def test_a_process_that_is_heard_before_the_news_of_its_start_loses_nothing() -> None:
    spawned = RankSpawned(rank=0, pid=7, device="cpu")
    launched = StageFinished(rank=0, stage=Stage.LAUNCHED, pid=7, host="gpu01")
    state = fold(session(1), [launched, spawned]).ranks[0]
    assert (state.host, state.device, state.stage) == ("gpu01", "cpu", Stage.LAUNCHED)
    new = fold(session(1), [launched, spawned, structs.replace(spawned, pid=8)]).ranks[0]
    assert (new.host, new.pid, new.stage) == ("", 8, None)


def test_a_rank_that_runs_a_cell_says_where_it_is() -> None:
    state = fold(session(1), life(0)[:-1]).ranks[0]
    assert state.status is Status.RUNNING
    assert describe(state) == "all_reduce (cell 1, line 2)"


@given(st.randoms(use_true_random=False))
def test_the_order_in_which_ranks_are_heard_does_not_matter(random: object) -> None:
    lives = [life(rank, pid=100 + rank) for rank in range(3)]
    in_turn = [event for one in lives for event in one]
    mixed = []
    while any(lives):
        one = random.choice([each for each in lives if each])  # type: ignore[attr-defined]
        mixed.append(one.pop(0))
    assert fold(session(3), mixed) == fold(session(3), in_turn)


@given(st.integers(0, 15))
def test_folding_in_two_parts_is_folding_at_once(cut: int) -> None:
    events = life(0)
    assert fold(fold(session(1), events[:cut]), events[cut:]) == fold(session(1), events)


def test_a_killed_rank_is_dead_whatever_is_heard_from_it_afterwards() -> None:
    killed = RankExited(rank=0, pid=100, exit_code=-9, last_words="step 7\n")
    late = Pulse(rank=0, doing="train.py, line 3")
    state = fold(session(1), [*life(0), killed, late]).ranks[0]
    assert state.status is Status.DEAD
    assert describe(state) == "killed by SIGKILL · last words: step 7"


def test_the_end_of_a_predecessor_does_not_kill_a_restarted_rank() -> None:
    events = [*life(0, pid=100), *life(0, pid=200), RankExited(rank=0, pid=100, exit_code=-9)]
    assert fold(session(1), events).ranks[0].status is Status.READY


def test_a_failed_stage_keeps_its_cause_and_remedy() -> None:
    failure = StageFailed(rank=0, stage=Stage.STORE, cause="nobody answers", remedy="%ddp_init")
    snapshot = fold(session(1), [*life(0)[:4], failure])
    assert snapshot.ranks[0].status is Status.FAILED
    assert describe(snapshot.ranks[0]) == "store: nobody answers"
    assert board(snapshot).notes == ("Rank 0: %ddp_init",)


@pytest.mark.parametrize(
    ("others", "left", "all_of_them"),
    [
        ((0,), "rank 0 has", "both: %ddp_restart --ranks 0-1"),
        ((0, 2), "ranks 0 and 2 have", "all of them: %ddp_restart --ranks 0-2"),
    ],
)
def test_a_dead_rank_can_be_brought_back_when_the_others_left_the_cell(
    others: tuple[int, ...], left: str, all_of_them: str
) -> None:
    running = [event for rank in others for event in life(rank, 100 + rank)[:-1]]
    killed = RankExited(rank=1, pid=101, exit_code=-9)
    (note,) = board(fold(session(len(others) + 1), [*running, *life(1, 101), killed])).notes
    assert note.startswith(f"Rank 1 can be brought back once {left} left the cell: ")
    assert note.endswith(f"interrupt it and restart {all_of_them}")


@pytest.mark.parametrize(("dead", "variables"), [(1, "the others keep"), (2, "without")])
def test_ranks_that_can_be_brought_back_are_told_whose_variables_stay(
    dead: int, variables: str
) -> None:
    died = [RankExited(rank=rank, pid=100 + rank, exit_code=3) for rank in range(dead)]
    known = fold(session(2), [*life(0, 100), *life(1, 101), *died])
    (note,) = board(known).notes
    assert f"can be brought back, {variables} their variables: %ddp_restart" in note


def test_a_cell_is_named_by_the_number_of_its_prompt() -> None:
    started = CellStarted(rank=0, cell=1, number=12)
    assert describe(fold(session(1), [*life(0)[:-3], started]).ranks[0]) == "cell 12"


def test_lost_messages_are_said() -> None:
    snapshot = fold(session(1), [*life(0), EventsLost(rank=0, count=3)])
    assert "Rank 0: 3 messages were lost." in board(snapshot).notes


def test_many_equal_ranks_share_a_row_and_the_odd_one_stands_alone() -> None:
    events = [event for rank in range(64) for event in life(rank, pid=100 + rank)]
    killed = RankExited(rank=3, pid=103, exit_code=-11)
    rows = board(fold(session(64), [*events, killed])).rows
    assert [row.ranks for row in rows] == [(0, 1, 2, *range(4, 64)), (3,)]
    assert rows[1].text == "killed by SIGSEGV"


def test_few_ranks_have_a_row_each() -> None:
    events = [event for rank in range(4) for event in life(rank)]
    assert [row.ranks for row in board(fold(session(4), events)).rows] == [(0,), (1,), (2,), (3,)]


def test_a_rank_not_heard_for_long_is_shown_as_silent() -> None:
    heard = [StageFinished(rank=0, stage=Stage.VERIFIED, heard_ns=1_000_000_000)]
    snapshot = fold(session(1), heard)
    late = Snapshot(ranks=snapshot.ranks, taken_ns=32_000_000_000)
    row = board(late).rows[0]
    assert row.silent
    assert row.age_s == 31.0


def test_the_headline_tells_the_ranks_that_differ() -> None:
    events = [*life(0, 100), *life(1, 101), RankExited(rank=1, pid=101, exit_code=1)]
    text = headline(fold(session(2), events))
    assert text == "2 ranks, no backend: rank 0 ready; rank 1 dead"


def test_an_exit_is_told_in_words() -> None:
    assert exit_text(-9) == "killed by SIGKILL"
    assert exit_text(3) == "exited with code 3"
    assert exit_text(-250) == "killed by signal 250"


def test_what_a_process_goes_on_without_is_said_once_for_all_its_ranks() -> None:
    text = "Collectives are not recorded: no room in /tmp."
    limited = [Limited(rank=rank, text=text) for rank in (0, 0, 1)]
    snapshot = fold(session(3), [*life(0), *life(1), *life(2), *limited])
    assert notes(snapshot) == (f"Ranks 0 and 1: {text}",)
    assert not fold(snapshot, [RankSpawned(rank=0, pid=7, device="cpu")]).ranks[0].limits
