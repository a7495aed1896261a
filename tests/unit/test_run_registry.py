"""Whose ranks are claimed, and waiting for a run that another thread sees through. No process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_notebook.errors import SessionLost, UsageMistake
from ddp_notebook.model import CellFinished, Ranks, RankState, Snapshot, Status
from ddp_notebook.session.findings import LastFindings
from ddp_notebook.session.guards import idle_ranks
from ddp_notebook.session.options import InitOptions
from ddp_notebook.session.pool import RankPool
from ddp_notebook.session.record import Record
from ddp_notebook.session.runs.endings import CellResult
from ddp_notebook.session.runs.registry import RunRegistry
from ddp_notebook.session.runs.run import CellRun, RunOptions, RunState
from ddp_notebook.testing import FakeCluster, FakeProcesses


def ready(world_size: int) -> Snapshot:
    return Snapshot(ranks=tuple(RankState(r, status=Status.READY) for r in range(world_size)))


def test_a_rank_that_is_about_to_begin_is_claimed_before_it_says_so() -> None:
    assert idle_ranks(None, "%%ddp", ready(3)) == (0, 1, 2)
    with pytest.raises(UsageMistake) as caught:
        idle_ranks(None, "%%ddp", ready(3), {1: "cell 7"})
    assert str(caught.value) == (
        "Rank 1 is still in an earlier cell (cell 7). Why: %ddp_why. Wait for it: %ddp_wait. "
        "Free it: %ddp_abort, or with new processes: %ddp_restart --ranks 1"
    )
    assert idle_ranks((0, 2), "%%ddp", ready(3), {1: "cell 7"}) == (0, 2)


def test_of_a_paused_rank_it_is_said_once_that_it_is_paused() -> None:
    state = RankState(0, status=Status.RUNNING, doing="paused at cell 7, line 2")
    with pytest.raises(UsageMistake, match=r"paused before a line \(cell 7\)\. Let it continue"):
        idle_ranks(None, "%%ddp", Snapshot(ranks=(state,)), {0: "cell 7"}, lambda: {0: "a line"})


AS_USUAL = RunOptions()


class Runs:
    """A registry of three ranks that are ready as far as is known, and what tests do with it."""

    def __init__(self, folder: Path) -> None:
        self.record = Record()
        cluster = FakeCluster(self.record)
        self.processes = FakeProcesses(cluster, InitOptions(world_size=3), folder)
        self.record.note(ranks=ready(3).ranks)
        self.pool = RankPool(self.record)
        self.registry = RunRegistry(self.record, self.pool, LastFindings())
        self.open = contextlib.ExitStack()

    def claim(
        self,
        *ranks: int,
        script: str = "",
        detach: bool = False,
        kind: type[CellRun] | None = None,
    ) -> CellRun:
        """Claim ranks, which stay claimed."""
        return self.open.enter_context(
            self.claiming(ranks, script, RunOptions(detach=detach), kind)
        )

    def claiming(
        self,
        ranks: Ranks,
        script: str = "",
        options: RunOptions = AS_USUAL,
        kind: type[CellRun] | None = None,
    ) -> contextlib.AbstractContextManager[CellRun]:
        def made(cell: int, members: Ranks) -> CellRun:
            return (kind or Nothing)(cell, members, self.processes, options, script)

        return self.registry.claim(ranks, "%%ddp", options, made)

    def finish(self, run: CellRun, *ranks: int) -> None:
        self.record.add([CellFinished(rank=r, cell=run.cell, outcome="ok") for r in ranks])


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    made = Runs(tmp_path)
    yield made
    made.open.close()


class Nothing(CellRun):
    """A run that sends nothing, and ends as its ranks did."""

    def send(self) -> Ranks:
        return ()

    def end(self) -> CellResult:
        return self.result()


class Broken(CellRun):
    """A run that cannot be sent."""

    def send(self) -> Ranks:
        raise ValueError("broken")


def test_ranks_are_claimed_until_they_have_finished_or_the_run_is_released(runs: Runs) -> None:
    first = runs.claim(0, 1)
    assert runs.claim(2).ranks == (2,)
    with pytest.raises(UsageMistake, match="Ranks 0 and 1 are still in an earlier cell"):
        runs.claim(0, 1)
    runs.finish(first, 0)
    assert runs.claim(0).ranks == (0,)
    first.release()
    assert runs.claim(1).ranks == (1,)


def test_a_claim_that_comes_to_nothing_is_given_back(runs: Runs) -> None:
    before = runs.registry.current
    with (
        pytest.raises(OSError, match="no file"),
        runs.claiming((0, 1)) as run,
    ):
        raise OSError("no file")
    assert run.state is RunState.ENDED
    assert runs.registry.current is before
    assert runs.claim(0, 1, 2).state is RunState.CLAIMED


def test_of_many_threads_one_gets_the_ranks(runs: Runs) -> None:
    together = threading.Barrier(8)
    claimed, refused = [], []

    def try_it() -> None:
        together.wait(10)
        try:
            claimed.append(runs.claim(0, 1, 2))
        except UsageMistake as mistake:
            refused.append(mistake)

    threads = [threading.Thread(target=try_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert (len(claimed), len(refused)) == (1, 7)


def test_a_script_needs_every_rank_and_nobody_beside_it(runs: Runs) -> None:
    cell = runs.claim(0)
    with pytest.raises(
        UsageMistake, match=r"^Cell 1 is still running on rank 0, and train\.py needs"
    ):
        runs.claim(1, script="train.py")
    cell.release()
    runs.claim(1, script="train.py")
    with pytest.raises(UsageMistake, match=r"^train\.py is still running on rank 1, and train\.py"):
        runs.claim(2)


def test_runs_are_kept_while_ranks_are_in_them_or_while_they_are_the_last(runs: Runs) -> None:
    first, second = runs.claim(0), runs.claim(1)
    for run in (first, second):
        run.watch()
        runs.finish(run, *run.ranks)
        run.release()
    assert runs.registry.current is second
    third = runs.claim(1)
    assert runs.registry.all == [first, third]
    assert runs.registry.current is third


def detach(runs: Runs, run: CellRun) -> None:
    run.patient = True
    run.detach()
    runs.registry.detached = run


def test_waiting_gives_what_the_run_gave_once_and_raises_what_it_raised(runs: Runs) -> None:
    run = runs.claim(0)
    detach(runs, run)
    assert runs.registry.wait(0).pending == (0,)
    assert not run.reported
    runs.finish(run, 0)
    assert runs.registry.wait(10).pending == ()
    assert run.reported

    detach(runs, runs.claim(0, kind=Broken))
    with pytest.raises(ValueError, match="broken"):
        runs.registry.wait(10)


def test_who_waits_when_the_session_ends_is_told_why(runs: Runs) -> None:
    run = runs.claim(0, 1)
    detach(runs, run)
    runs.registry.lose_all("The controller ended.")
    assert run.state is RunState.ENDED
    error = runs.registry.wait(10).error
    assert isinstance(error, SessionLost)
    assert str(error) == "The controller ended. Start again: %ddp_init"
