"""One run from claim to end, on ranks that do what a test says: no process, no notebook."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from traces import report, with_facts

from ddp_notebook.diagnosis import diagnose_run
from ddp_notebook.errors import CellFailed, CellInterrupted, SessionLost, Stuck
from ddp_notebook.model import (
    Activity,
    CallFacts,
    Case,
    Category,
    CellFinished,
    CellStarted,
    Collective,
    Collectives,
    Diagnosis,
    Event,
    Finding,
    Output,
    OutputKind,
    Phase,
    Place,
    RankExited,
    RankReport,
    RankState,
    Snapshot,
    Status,
)
from ddp_notebook.rank import calls
from ddp_notebook.session.findings import Found, LastFindings
from ddp_notebook.session.options import InitOptions
from ddp_notebook.session.record import Record
from ddp_notebook.session.runs import run as running
from ddp_notebook.session.runs.gather import (
    LaunchParameters,
    gather,
    still_waiting,
    with_sources_in_use,
)
from ddp_notebook.session.runs.run import CellRun, RunOptions, RunState
from ddp_notebook.testing import FakeCluster, FakeProcesses

BOTH = (0, 1)


class Setting:
    """A run of one cell on two ranks."""

    def __init__(self, folder: Path) -> None:
        self.record = Record()
        self.cluster = FakeCluster(self.record)
        processes = FakeProcesses(self.cluster, InitOptions(world_size=2), folder)
        self.record.note(ranks=tuple(RankState(rank, status=Status.READY) for rank in BOTH))
        self.run = CellRun(1, BOTH, processes, RunOptions(wait="forever"))
        self.run.order = calls.RUN_CELL, calls.Cell(1, 1, "%%ddp", "x = 1")
        self.record.subscribe(self.run.take)

    def ranks_do(self, rank_does: Callable[[int], Iterable[Event]]) -> None:
        self.cluster.tells = lambda rank, _: rank_does(rank)

    def see_through(self, interrupted: Callable[[], bool] = lambda: False) -> Any:
        self.run.watch()
        return self.run.see_through(interrupted)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


def started(rank: int) -> CellStarted:
    return CellStarted(rank=rank, cell=1)


def finished(rank: int, outcome: str = "ok", **fields: Any) -> CellFinished:
    return CellFinished(rank=rank, cell=1, outcome=outcome, **fields)


def test_a_cell_that_finishes_is_claimed_until_it_is_released(setting: Setting) -> None:
    states = []

    def rank_does(rank: int) -> Iterable[Event]:
        states.append(setting.run.state)
        return (started(rank), finished(rank))

    setting.ranks_do(rank_does)
    assert setting.run.state is RunState.CLAIMED
    assert setting.run.state.claimed
    result = setting.see_through()
    assert (result.error, result.pending) == (None, ())
    assert states == [RunState.RUNNING] * 2
    assert setting.run.state is RunState.ENDED
    assert not setting.run.state.claimed
    assert setting.cluster.sent == [(BOTH, calls.RUN_CELL.name)]


def test_a_rank_that_dies_without_a_word_gets_the_last_line_that_it_wrote(
    setting: Setting,
) -> None:
    def rank_does(rank: int) -> Iterable[Event]:
        if rank == 0:
            return (started(0), finished(0))
        wrote = Output(rank=1, cell=1, what=OutputKind.STDOUT, text="epoch 3\n")
        return (started(1), wrote, RankExited(rank=1, pid=9, exit_code=-9))

    setting.ranks_do(rank_does)
    error = setting.see_through().error
    assert isinstance(error, CellFailed)
    assert "rank 1 died, killed by SIGKILL (it last wrote: epoch 3)" in str(error)


def test_an_interrupt_reaches_ranks_that_have_begun_and_once(setting: Setting) -> None:
    setting.ranks_do(lambda rank: (started(rank),))
    setting.cluster.signalled = lambda rank, _: (finished(rank, "interrupted", line=2),)
    result = setting.see_through(lambda: True)
    assert isinstance(result.error, CellInterrupted)
    assert "ranks 0 and 1 stopped at cell line 2" in str(result.error)
    assert setting.cluster.signals == [(0, signal.SIGINT), (1, signal.SIGINT)]
    assert setting.run.state is RunState.ENDED


def test_a_rank_that_does_not_stop_is_left_and_one_that_begins_late_is_interrupted_then(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_STOP_WITHIN_S", 0.05)
    setting.ranks_do(lambda rank: (started(0),) if rank == 0 else ())
    result = setting.see_through(lambda: True)
    assert isinstance(result.error, CellInterrupted)
    assert result.pending == BOTH
    assert setting.run.state is RunState.INTERRUPTED
    assert setting.cluster.signals == [(0, signal.SIGINT)]
    setting.record.add((started(1),))
    assert setting.cluster.signals == [(0, signal.SIGINT), (1, signal.SIGINT)]


def test_a_run_that_is_stuck_is_released_with_its_ranks_and_waited_for_again(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = Finding(Category.MISSING_RANK, (1,), "rank 1 is missing", "Start it.")
    diagnosis = Diagnosis((finding,), None, 2)

    class Detector:
        stuck_in = Case(())
        latest = diagnosis
        seen_late = None

        def turn(self) -> Diagnosis | None:
            return diagnosis

    monkeypatch.setattr(running, "StallDetector", lambda look, moved: Detector())
    setting.ranks_do(lambda rank: (started(rank),))
    setting.run.patient = False
    result = setting.see_through()
    assert isinstance(result.error, Stuck)
    assert "Fix: Start it." in str(result.error)
    assert (result.diagnosis, result.pending) == (diagnosis, BOTH)
    assert setting.run.state is RunState.STUCK

    setting.run.patient = True
    setting.run.detach()
    assert setting.run.state is RunState.RUNNING
    assert len(setting.cluster.sent) == 1, "it is not sent again"
    setting.record.add([finished(rank) for rank in BOTH])
    assert setting.run.ended.result(10).error is None
    assert not setting.run.left_with_ranks
    assert setting.run.state is RunState.ENDED


def test_a_verb_that_gives_a_run_up_ends_it_for_who_waits_without_a_diagnosis(
    setting: Setting,
) -> None:
    setting.ranks_do(lambda rank: (started(rank),))
    setting.cluster.signalled = lambda rank, _: (finished(rank, "error", ename="Freed"),)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(setting.see_through)
        setting.record.wait_for(lambda: setting.run.events.started == set(BOTH), 10)
        setting.run.abort()
        assert setting.run.state is RunState.INTERRUPTING
        setting.run.signal_started()
        result = ended.result(10)
    assert isinstance(result.error, CellFailed)
    assert result.diagnosis is None
    assert setting.run.state is RunState.ENDED


def test_what_was_found_in_a_run_is_not_told_of_the_first_run_of_the_next_session(
    setting: Setting,
) -> None:
    kept, stuck = LastFindings(), setting.run.found
    kept.begin(stuck)
    setting.ranks_do(lambda rank: [started(rank)])  # and no more: they are in it for ever
    stuck.take(Diagnosis((Finding(Category.UNDECIDED, (0,), "why", "what"),)))
    assert not stuck.run.over
    setting.run.lose("%ddp_shutdown.")
    following = Found("cell 2", 2)
    kept.begin(following)
    assert kept.last is following


def test_a_session_that_ends_under_a_run_is_its_end(setting: Setting) -> None:
    setting.run.detach()
    setting.run.lose("The fork server ended.")
    result = setting.run.ended.result(10)
    assert isinstance(result.error, SessionLost)
    assert str(result.error) == "The fork server ended. Start again: %ddp_init"
    assert (setting.run.done, setting.run.state) == (False, RunState.ENDED)
    assert not setting.run.left_with_ranks


def test_what_fails_because_the_session_ends_is_its_end_too(setting: Setting) -> None:
    def rank_does(rank: int) -> Iterable[Event]:
        setting.run.lose("The fork server ended.")
        raise OSError("the connection is closed")

    setting.ranks_do(rank_does)
    assert isinstance(setting.see_through().error, SessionLost)


def test_what_fails_for_another_reason_is_raised_and_the_ranks_are_released(
    setting: Setting,
) -> None:
    def rank_does(rank: int) -> Iterable[Event]:
        raise OSError("no route")

    setting.ranks_do(rank_does)
    with pytest.raises(OSError, match="no route"):
        setting.see_through()
    assert not setting.run.state.claimed


def test_a_rank_that_cannot_be_reached_did_not_run_it_and_nobody_waits_for_it(
    setting: Setting,
) -> None:
    setting.cluster.unreachable = (1,)
    setting.ranks_do(lambda rank: (started(rank), finished(rank)))
    error = setting.see_through().error
    assert str(error) == (
        "rank 1 did not run it: the process could not be reached; rank 0 finished."
    )


def test_where_the_ranks_are_gone_because_the_session_is_that_is_what_is_said(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks die with their fork server, and its end is known a moment after theirs."""
    setting.cluster.unreachable = BOTH
    wait = setting.run.over.wait

    def lose_it_and_wait(timeout_s: float) -> bool:
        setting.run.lose("The fork server ended.")
        return wait(timeout_s)

    monkeypatch.setattr(setting.run.over, "wait", lose_it_and_wait)
    error = setting.see_through().error
    assert isinstance(error, SessionLost)
    assert str(error) == "The fork server ended. Start again: %ddp_init"


def test_ranks_that_cannot_be_reached_are_said_to_be_so_if_nothing_more_is_heard(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_CAUSE_KNOWN_WITHIN_S", 0.0)
    setting.cluster.unreachable = BOTH
    error = setting.see_through().error
    assert str(error) == "ranks 0 and 1 did not run it: the process could not be reached."


def test_a_detached_run_is_stopped_as_an_interrupt_stops_it(setting: Setting) -> None:
    begun = threading.Event()

    def rank_does(rank: int) -> Iterable[Event]:
        if rank == 1:
            begun.set()
        return (started(rank),)

    setting.ranks_do(rank_does)
    setting.cluster.signalled = lambda rank, _: (finished(rank, "interrupted"),)
    setting.run.detach()
    assert begun.wait(10)
    setting.run.stop()
    assert isinstance(setting.run.ended.result(10).error, CellInterrupted)


@pytest.mark.parametrize(
    ("before", "act", "after"),
    [
        (RunState.CLAIMED, CellRun.abort, RunState.INTERRUPTING),
        (RunState.STUCK, CellRun.abort, RunState.INTERRUPTED),
        (RunState.ENDED, CellRun.abort, RunState.ENDED),
        (RunState.LOST, CellRun.abort, RunState.LOST),
        (RunState.INTERRUPTED, CellRun.watch, RunState.INTERRUPTING),
        (RunState.STUCK, CellRun.watch, RunState.RUNNING),
        (RunState.CLAIMED, CellRun.release, RunState.ENDED),
        (RunState.LOST, CellRun.release, RunState.ENDED),
        (RunState.INTERRUPTING, CellRun.release, RunState.INTERRUPTED),
        (RunState.RUNNING, CellRun.release, RunState.STUCK),
    ],
)
def test_the_ways_from_state_to_state_with_ranks_in_the_run(
    setting: Setting,
    before: RunState,
    act: Callable[[CellRun], None],
    after: RunState,
) -> None:
    setting.run.state = before
    act(setting.run)
    assert setting.run.state is after


def test_a_case_has_the_code_of_earlier_cells_of_which_ranks_are_in_a_function() -> None:
    """In a notebook the function that a cell calls is mostly defined in another one."""
    cells = {"cell 1": "def train(): ...", "cell 2": "def train(): dist.barrier()", "cell 3": "x"}
    way = (Place("cell 4", 1), Place("cell 2", 1, "train"))
    issued = Collectives({0: (Collective(0, 0, "barrier", path=way),)})
    case = Case((RankReport(0),), collectives=issued, sources={"cell 4": "train()"})
    assert set(with_sources_in_use(case, cells).sources) == {"cell 2", "cell 4"}
    failed = report(0, error_at=(Place("cell 1", 1, "train"),))
    sources = with_sources_in_use(Case((failed,), sources={"cell 4": "train()"}), cells).sources
    assert set(sources) == {"cell 1", "cell 4"}
    assert with_sources_in_use(case, {}) is case


def stuck_reports() -> dict[int, RankReport]:
    """Rank 0 waits for rank 1, which raised."""
    raised = {"error_type": "IndexError", "error_text": "10", "error_at": (Place("cell 1", 4),)}
    return {
        0: report(0, Activity.WAITING, inside="collective", pid=70, main_cpu_s=2.0),
        1: report(1, Activity.FAILED, pid=71, **raised),
    }


def case_of(reports: dict[int, RankReport], *records: Collective) -> Case:
    return Case(tuple(reports.values()), collectives=Collectives({0: records}))


NOT_DONE = Collective(rank=0, number=7, operation="all_reduce")
MOMENTS = {
    "it misses the time to answer": {"activity": Activity.SILENT, "process": "sleeping"},
    "it misses it, and its main thread answers a signal": {
        "activity": Activity.SILENT,
        "process": "running",
    },
    "a thread of torch's waits for a core": {"activity": Activity.BUSY, "runnable": True},
}


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS.keys())
def test_a_rank_that_was_found_waiting_is_named_so_while_nothing_of_it_has_moved(
    moment: dict[str, Any],
) -> None:
    stuck = case_of(stuck_reports(), NOT_DONE)
    now = {**stuck_reports(), 0: report(0, pid=70, main_cpu_s=2.0, **moment)}
    seen = still_waiting(case_of(now, NOT_DONE), stuck)
    (finding,) = diagnose_run(seen).findings
    assert (finding.category, finding.ranks) == (Category.EXCEPTION_ON_ONE_RANK, (1,))
    assert finding.waiting == (0,)


DONE = replace(NOT_DONE, phase=Phase.DONE)
NEXT = replace(NOT_DONE, number=8)
BUSY = report(0, Activity.BUSY, runnable=True, pid=70, main_cpu_s=2.0)
MOVED = {
    "its collective is done": (BUSY, (DONE,)),
    "it has called the next": (BUSY, (NOT_DONE, NEXT)),
    "its main thread has run": (with_facts(BUSY, main_cpu_s=2.01), (NOT_DONE,)),
    "it is at another line": (replace(BUSY, path=(Place("cell 1", 9),)), (NOT_DONE,)),
    "it is in Python, and no thread runs": (with_facts(BUSY, runnable=False), (NOT_DONE,)),
    "it is another process": (with_facts(BUSY, pid=99), (NOT_DONE,)),
    "it is stopped": (
        report(0, Activity.SILENT, process="stopped", pid=70, main_cpu_s=2.0),
        (NOT_DONE,),
    ),
}


@pytest.mark.parametrize(("report", "records"), MOVED.values(), ids=MOVED.keys())
def test_a_rank_that_was_found_waiting_is_told_as_it_is_once_it_moves(
    report: RankReport, records: tuple[Collective, ...]
) -> None:
    now = case_of({**stuck_reports(), 0: report}, *records)
    assert still_waiting(now, case_of(stuck_reports(), NOT_DONE)) == now


@pytest.mark.parametrize(("waited", "activity"), [(True, "waiting"), (False, "silent")])
def test_of_a_rank_whose_socket_was_removed_its_records_tell_that_it_waits(
    waited: bool, activity: str
) -> None:
    """A call that lasts until it is done; what is not waited for proves nothing of the rank."""
    cluster = FakeCluster(Record(), unreachable=(0,))
    place = Place("cell 2", 2, "", "dist.barrier()")
    issued = Collective(0, 4, "barrier", path=(place,), call=CallFacts(waited=waited))
    known = Collectives({0: (replace(issued, number=3, phase=Phase.DONE), issued)})
    state = RankState(0, status=Status.RUNNING, pid=100_000)
    case = gather(cluster, Snapshot((state,)), LaunchParameters(), collectives=lambda: known)
    (told,) = case.ranks
    assert told.activity.value == activity and told.process.unreachable
    assert (told.waits_for, told.path) == ((4, (place,)) if waited else (None, ()))


def test_a_rank_that_cannot_answer_keeps_what_the_system_knows_of_its_process() -> None:
    cluster = FakeCluster(Record())
    cluster.answers["report"] = {0: calls.CannotAnswer("TypeError: no")}
    state = RankState(0, status=Status.RUNNING, pid=os.getpid())
    case = gather(cluster, Snapshot((state,)), LaunchParameters())
    (told,) = case.ranks
    assert (told.activity, told.process.pid) == (Activity.SILENT, os.getpid())
    assert told.process.cannot_answer == "TypeError: no" and told.process.state == "running"
