"""The table after a step: where each rank stands, and for whom it waits."""

from __future__ import annotations

import pytest

from ddp_notebook.model import RankState, Snapshot, Stage, Status
from ddp_notebook.views.step_rows import setup_table, waits_in_stage

SECOND_NS = 1_000_000_000


def paused(rank: int, passed: Stage = Stage.LAUNCHED) -> RankState:
    return RankState(rank, Status.PAUSED, passed)


def inside(rank: int, stage: Stage, doing: str = "") -> RankState:
    """It is in a stage and has passed the one before."""
    passed = list(Stage)[stage.number - 2]
    return RankState(
        rank, Status.SETTING_UP, passed, stage, detail="waiting for others", doing=doing
    )


def done(rank: int) -> RankState:
    return RankState(rank, Status.READY, Stage.VERIFIED)


def snapshot(*ranks: RankState) -> Snapshot:
    return Snapshot(ranks=ranks)


def test_before_the_first_stage_all_are_paused_and_the_next_call_steps_them() -> None:
    table = setup_table(snapshot(*(paused(rank) for rank in range(3))))
    assert table.title == "Setup, step by step: ranks 0-2 paused"
    assert [(row.ranks, row.passed, row.state) for row in table.rows] == [
        ((0,), "launched", "paused"),
        ((1,), "launched", "paused"),
        ((2,), "launched", "paused"),
    ]
    assert table.next_call == "%ddp_step"
    assert table.about == f"environment: {Stage.ENVIRONMENT.about}"
    assert table.link == Stage.ENVIRONMENT.link


@pytest.mark.parametrize("stage", [Stage.RENDEZVOUS, Stage.PROCESS_GROUP, Stage.VERIFIED])
def test_in_a_stage_that_all_pass_together_a_rank_waits_for_who_has_not_come_to_it(
    stage: Stage,
) -> None:
    before = list(Stage)[stage.number - 2]
    shot = snapshot(inside(0, stage), paused(1, before), inside(2, stage), paused(3))
    table = setup_table(shot)
    assert [row.waits_for for row in table.rows] == [(1, 3), (), (1, 3), ()]
    assert table.rows[0].state == "waiting"
    assert table.rows[0].text == f"in {stage.value}, waiting for others"
    assert table.next_call == "%ddp_step --ranks 1,3"
    assert table.about.startswith(f"{stage.value}: ")


def test_a_rank_that_is_in_the_stage_or_past_it_is_not_waited_for() -> None:
    shot = snapshot(inside(0, Stage.RENDEZVOUS), paused(1, Stage.RENDEZVOUS), done(2))
    assert waits_in_stage(shot.ranks[0], shot, "session") == ()


def test_only_in_rank_0_is_the_store_waited_for() -> None:
    shot = snapshot(paused(0), inside(1, Stage.STORE), inside(2, Stage.STORE))
    assert [waits_in_stage(state, shot, "session") for state in shot.ranks] == [(), (), ()]
    assert [waits_in_stage(state, shot, "rank0") for state in shot.ranks] == [(), (0,), (0,)]
    opened = snapshot(paused(0, Stage.STORE), inside(1, Stage.STORE))
    assert waits_in_stage(opened.ranks[1], opened, "rank0") == ()


@pytest.mark.parametrize("stage", [Stage.ENVIRONMENT])
def test_in_a_stage_of_its_own_a_rank_waits_for_nobody(stage: Stage) -> None:
    shot = snapshot(inside(0, stage), paused(1))
    assert waits_in_stage(shot.ranks[0], shot, "rank0") == ()


def test_what_a_rank_does_is_said_once() -> None:
    doing = "rendezvous: waits for rank 1 to join (key join/1)"
    table = setup_table(snapshot(inside(0, Stage.RENDEZVOUS, doing), paused(1, Stage.STORE)))
    assert table.rows[0].text == "in rendezvous, waits for rank 1 to join (key join/1)"


def test_a_rank_that_failed_says_in_which_stage_and_why() -> None:
    failed = RankState(1, Status.FAILED, Stage.ENVIRONMENT, Stage.STORE, cause="MASTER_PORT is 0.")
    table = setup_table(snapshot(inside(0, Stage.STORE), failed))
    assert (table.rows[1].state, table.rows[1].text) == ("failed", "store: MASTER_PORT is 0.")
    assert table.title == "Setup, step by step: rank 0 waiting; rank 1 failed"
    assert table.next_call == "%ddp_why"
    without_stage = RankState(0, Status.FAILED, cause="given up")
    assert setup_table(snapshot(without_stage)).rows[0].text == "setup: given up"


def test_a_rank_that_died_is_waited_for_and_not_stepped() -> None:
    shot = snapshot(inside(0, Stage.RENDEZVOUS), RankState(1, Status.DEAD, Stage.STORE))
    table = setup_table(shot)
    assert table.rows[0].waits_for == (1,)
    assert table.rows[1].state == "dead"
    assert table.next_call == "%ddp_why"


def test_when_every_rank_is_verified_nothing_is_left_to_type() -> None:
    table = setup_table(snapshot(done(0), done(1)))
    assert table.title == "Setup is complete: every rank is verified."
    assert [row.state for row in table.rows] == ["done", "done"]
    assert (table.next_call, table.about, table.link) == ("", "", "")


def test_the_stage_explained_is_the_furthest_that_ranks_are_in() -> None:
    table = setup_table(snapshot(inside(0, Stage.STORE), inside(1, Stage.RENDEZVOUS), paused(2)))
    assert table.about == f"rendezvous: {Stage.RENDEZVOUS.about}"


def test_how_long_it_has_been_so_is_counted_from_when_it_began() -> None:
    rank = RankState(0, Status.PAUSED, Stage.STORE, since_ns=10 * SECOND_NS)
    table = setup_table(Snapshot(ranks=(rank, paused(1)), taken_ns=13 * SECOND_NS))
    assert [row.since_s for row in table.rows] == [3.0, 0.0]
    early = Snapshot(ranks=(rank,), taken_ns=9 * SECOND_NS)
    assert setup_table(early).rows[0].since_s == 0.0
