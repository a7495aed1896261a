"""What a board shows of the past: each run with its finding, its lines and its collectives."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from saved_runs import collective

from ddp_notebook.board.source import BoardSource, ended_badly
from ddp_notebook.board.timeline import Moment, Past
from ddp_notebook.model import (
    Category,
    CellFinished,
    Collectives,
    Diagnosis,
    Finding,
    RankState,
    Snapshot,
    Status,
)
from ddp_notebook.session import Session
from ddp_notebook.session.runs.run import CellRun
from ddp_notebook.session.runs.stall_detector import StallDetector
from ddp_notebook.testing import fake_run


def a_session(states: tuple[RankState, ...], run: CellRun | None) -> SimpleNamespace:
    """A session with ranks in these states, whose current or last run is `run`."""
    return SimpleNamespace(
        record=SimpleNamespace(snapshot=Snapshot(states)),
        pool=SimpleNamespace(logs=None, processes=None),
        running=True,
        benchmarks=SimpleNamespace(current=None),
        runs=SimpleNamespace(current=run, stops={}),
        setup=SimpleNamespace(store=""),
    )


def test_a_moment_has_what_was_found_then_and_not_what_was_found_later() -> None:
    past = Past()
    past.note(Moment(10, [], []))
    past.note(Moment(20, ["a hang"], ["cell 3, line 4"]))
    past.note(Moment(25, ["a hang"], ["cell 3, line 4"]))  # the same: it was found at 20
    past.note(Moment(40, [], []))
    found = {at: list(past.found_at(at).findings) for at in (5, 15, 20, 39, 41)}
    assert found == {5: [], 15: [], 20: ["a hang"], 39: ["a hang"], 41: []}
    assert past.found_at(30).at_ns == 20


def test_a_moment_of_an_earlier_run_has_the_collectives_of_that_run() -> None:
    past = Past()
    first, grown, second = (
        Collectives({0: tuple(collective(0, n, 1, 2) for n in range(count))}) for count in (1, 3, 2)
    )
    past.keep(1, 100, first)
    past.keep(1, 150, grown)
    past.keep(2, 200, second)
    assert past.collectives_at(50) == Collectives()
    assert past.collectives_at(120) is past.collectives_at(199) is grown
    assert past.collectives_at(201) is second


@pytest.mark.parametrize(
    ("outcomes", "look"),
    [(["ok", "ok"], False), (["error", "ok"], True), (["error", "interrupted"], False)],
)
def test_of_ranks_that_were_freed_no_culprit_is_named_again(
    outcomes: list[str], look: bool
) -> None:
    ends = {n: SimpleNamespace(outcome=each, trained=()) for n, each in enumerate(outcomes)}
    run = cast(CellRun, cast(Any, SimpleNamespace(events=SimpleNamespace(finished=ends))))
    assert ended_badly(run) is look


def test_what_a_cell_said_at_its_end_stands_on_the_board_at_the_next_look() -> None:
    """Asking the ranks again takes a second or two, in which it said "No finding"."""
    found = Diagnosis((Finding(Category.REPLICA_DIVERGENCE, (1,), "rank 1 differs", ""),), None, 2)
    run = fake_run(1, (0, 1))
    ends = [
        CellFinished(rank=rank, time_ns=5, cell=1, outcome="ok", trained=True) for rank in (0, 1)
    ]
    run.take(ends)
    run.found.take(found)
    states = (RankState(0, Status.READY), RankState(1, Status.READY))
    session = a_session(states, None)
    source = BoardSource(cast(Session, session))
    session.runs.current = run
    facts, _ = source.look()
    assert facts.diagnosis is not None and facts.diagnosis.findings == found.findings
    later = BoardSource(cast(Session, session)).look()[0]
    assert later.diagnosis is not None, "a board that is opened later says what %ddp_why says"
    run.found.judged = False
    assert source.checking is False, "it ended long ago"
    session.record.snapshot = Snapshot((states[0], RankState(1, Status.STARTING)), generation=1)
    facts, _ = source.look()
    assert facts.diagnosis is None, "the ranks are restarted"


def test_a_board_that_is_opened_while_ranks_hang_says_so_at_once() -> None:
    """It said "No finding" until ranks were asked again."""
    found = Diagnosis((Finding(Category.UNEVEN_INPUTS, (1,), "left the loop", ""),), None, 2)
    run = fake_run(1, (0, 1))
    run.detector = cast(StallDetector, SimpleNamespace(latest=found))
    states = (RankState(0, Status.RUNNING), RankState(1, Status.READY))
    source = BoardSource(cast(Session, a_session(states, run)))
    assert source.look()[0].diagnosis is found


def test_what_a_cell_said_of_ranks_that_are_stuck_in_it_stands_on_the_board() -> None:
    """Of "undecided", which no rule finds anew, the board never knew."""
    found = Diagnosis((Finding(Category.UNDECIDED, (), "nothing moves", ""),), None, 2)
    run = fake_run(1, (0, 1))
    states = (RankState(0, Status.RUNNING), RankState(1, Status.RUNNING))
    source = BoardSource(cast(Session, a_session(states, run)))
    assert source.look()[0].diagnosis is None
    run.found.take(found)  # no thread waits for it any more
    facts, _ = source.look()
    assert facts.diagnosis is not None and facts.diagnosis.findings == found.findings


def test_until_a_run_is_examined_the_board_says_that_it_is_being_checked() -> None:
    run = fake_run(1, (0,))
    now_ns = time.monotonic_ns()
    end = CellFinished(rank=0, time_ns=5, heard_ns=now_ns, cell=1, outcome="ok", trained=True)
    source = BoardSource(cast(Session, a_session((RankState(0, Status.READY),), run)))
    assert not source.checking
    run.take([end])
    assert source.checking
    run.found.judged = True
    assert not source.checking
