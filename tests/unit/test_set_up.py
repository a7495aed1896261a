"""Setup, restart and abort of ranks that do what a test says: no process, no notebook."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from traces import report

from ddp_notebook.errors import CellFailed, SessionLost, SetupFailed, UsageMistake
from ddp_notebook.model import (
    Activity,
    Category,
    CellFinished,
    CellStarted,
    Event,
    RankExited,
    Stage,
    StageFailed,
    StageFinished,
    StageStarted,
)
from ddp_notebook.rank import calls
from ddp_notebook.session import bring_up
from ddp_notebook.session.set_up import SetUp
from ddp_notebook.testing import FakeCluster, FakeProcesses, fake_session

STAGES = tuple(Stage)[1:]


def comes_up(rank: int, arguments: Mapping[str, Any]) -> Iterable[Event]:
    """A rank that passes every stage."""
    for stage in STAGES:
        yield StageStarted(rank=rank, stage=stage)
        yield StageFinished(rank=rank, stage=stage)


def fails_at_the_store(rank: int, arguments: Mapping[str, Any]) -> Iterable[Event]:
    """As `comes_up`, but rank 1 cannot reach the store."""
    if rank != 1:
        return comes_up(rank, arguments)
    failed = StageFailed(rank=1, stage=Stage.STORE, cause="nothing listens", remedy="Start it.")
    return (StageStarted(rank=1, stage=Stage.STORE), failed)


def ready(folder: Path) -> tuple[Any, FakeCluster, FakeProcesses]:
    session, cluster, processes = fake_session(folder)
    cluster.answers["bring up"] = {0: None, 1: None}
    cluster.calls["bring up"] = comes_up
    session.set_up(processes.options)
    return session, cluster, processes


def test_ranks_that_pass_every_stage_are_ready(tmp_path: Path) -> None:
    session, cluster, _ = ready(tmp_path)
    assert session.ready
    assert session.record.snapshot.init_method == "env://127.0.0.1:29500"
    assert cluster.called == ["bring up"]
    with pytest.raises(UsageMistake, match="2 ranks are running already") as caught:
        session.init(session.options)
    assert "Another number" not in str(caught.value)


def test_a_rank_that_fails_is_named_with_its_remedy_and_the_board(tmp_path: Path) -> None:
    session, cluster, processes = fake_session(tmp_path)
    cluster.answers["bring up"] = {0: None, 1: None}
    cluster.calls["bring up"] = fails_at_the_store
    failed = report(
        1,
        Activity.FAILED,
        inside="store",
        error_text="nothing listens",
        error_category=Category.STORE_GONE.value,
        error_remedy="Start it.",
    )
    cluster.answers["report"] = {1: failed}
    with pytest.raises(SetupFailed, match=r"Rank 1: (?s:.*)Fix: Start it\.") as caught:
        session.set_up(processes.options)
    assert caught.value.board is not None
    assert not session.ready
    cluster.calls["bring up"] = comes_up
    assert session.init(processes.options).snapshot.ready, "once more, in place"
    assert processes.launched == [(0, 1)]


def test_a_restart_gives_new_processes_and_builds_the_group_anew(tmp_path: Path) -> None:
    session, cluster, processes = ready(tmp_path)
    assert session.restart((1,)).snapshot.ready
    assert processes.launched == [(0, 1), (1,)]
    assert cluster.called == ["bring up"] * 2
    assert session.record.snapshot.generation == 2


def test_a_rank_that_does_not_come_out_of_a_cell_is_replaced_and_the_board_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bring_up, "_HEARD_WITHIN_S", 0.05)
    session, cluster, processes = ready(tmp_path)
    cluster.tells = lambda rank, request: (CellStarted(rank=rank, cell=request.cell),)

    def interrupted(rank: int, number: int) -> Iterable[Event]:
        if rank == 0:  # rank 1 holds Python's lock, and hears nothing
            return (CellFinished(rank=0, cell=1, outcome="interrupted"),)
        return ()

    cluster.signalled = interrupted
    session.run_cell("x = 1", detach=True)
    killed = RankExited(rank=1, pid=100_001, exit_code=-9)
    monkeypatch.setattr(processes, "stop", lambda ranks: session.record.add((killed,)))
    board = session.abort()
    assert board.snapshot.ready
    assert processes.launched == [(0, 1), (1,)]
    note = "Rank 1 could not be unblocked. Its process was replaced; its variables are lost."
    assert board.snapshot.notes == (note,)
    assert isinstance(session.wait().error, CellFailed)
    assert session.abort().snapshot.notes == ()


def test_a_set_up_in_place_that_replaces_a_process_says_so(tmp_path: Path) -> None:
    session, _, processes = ready(tmp_path)
    session.record.add((RankExited(rank=1, pid=100_001, exit_code=-9),))
    board = session.set_up(processes.options)
    assert processes.launched == [(0, 1), (1,)]
    assert board.snapshot.notes == (
        "Rank 1 was dead (killed by SIGKILL). Its process was replaced; its variables are lost.",
    )
    assert session.set_up(processes.options).snapshot.notes == ()


def test_ranks_that_were_lost_before_that_was_known_are_started_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork server has ended, and the thread that reads from it has not been told yet."""
    session, _, processes = ready(tmp_path)

    def lost(ranks: Any) -> None:
        raise SessionLost("The fork server has ended. Start again: %ddp_init")

    begun: list[Any] = []
    monkeypatch.setattr(processes, "launch", lost)
    monkeypatch.setattr(SetUp, "_start", lambda _, *given: begun.append(given))
    monkeypatch.setattr(SetUp, "_set_up", lambda setup, _: setup._board())
    session.record.add([RankExited(rank=rank, pid=100_000 + rank, exit_code=-9) for rank in (0, 1)])
    session.init(processes.options)
    ((_, _, why),) = begun
    assert why == "All processes are new, without variables: those before had ended."


def test_a_cell_of_a_session_runs_on_the_fake_ranks(tmp_path: Path) -> None:
    session, cluster, _ = ready(tmp_path)

    def runs(rank: int, request: calls.Cell) -> Iterable[Event]:
        cell = request.cell
        return (
            CellStarted(rank=rank, cell=cell),
            CellFinished(rank=rank, cell=cell, outcome="error", ename="ValueError", line=1),
        )

    cluster.tells = runs
    error = session.run_cell("raise ValueError").error
    assert str(error) == "ranks 0 and 1 raised ValueError (cell line 1)."
