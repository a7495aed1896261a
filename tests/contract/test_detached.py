"""Cells and scripts that nobody waits for, waiting for them after all, and runs at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from results import rank_pids, texts
from support import GATE, HANG, begun, eventually

from ddp_notebook.errors import (
    CellFailed,
    CellInterrupted,
    NoSession,
    SessionLost,
    Stuck,
    UsageMistake,
)
from ddp_notebook.model import Status
from ddp_notebook.session import InitOptions, Session
from ddp_notebook.session.runs.endings import CellResult
from ddp_notebook.session.runs.run import CellRun
from ddp_notebook.testing import bring_up_of, cluster_of

pytestmark = pytest.mark.timeout(180)

ALL_REDUCE = "x = torch.ones(1)\ndist.all_reduce(x)\nassert x == 2"
LONG = "import time\nprint('begun')\ntime.sleep(600)"
SCRIPT = (
    "import os, time, torch, torch.distributed as dist\n"
    "dist.init_process_group('gloo')\n"
    "print('begun', flush=True)\n"
    "while not os.path.exists({gate!r}):\n"
    "    time.sleep(0.01)\n"
    "x = torch.ones(2)\n"
    "dist.all_reduce(x)\n"
    "print('sum', x[0].item())\n"
    "{more}"
    "dist.destroy_process_group()\n"
)


@pytest.fixture
def ranks(ranks2: Session) -> Iterator[Session]:
    """Two ranks, free before and after, with the group of the session."""
    yield ranks2
    if not ranks2.record.snapshot.ready or any(run.state.claimed for run in ranks2.runs.all):
        ranks2.abort()
    if ranks2.runs.detached is not None:
        ranks2.runs.detached.ended.exception(30)
        ranks2.runs.detached.reported = True
    ranks2.run_cell(ALL_REDUCE).raise_for_error()


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A file that does not exist: what waits for it ends when a test makes it."""
    return tmp_path / "gate"


def script(tmp_path: Path, gate: Path, more: str = "") -> str:
    """A training script that waits for `gate` first."""
    path = tmp_path / "job.py"
    path.write_text(SCRIPT.format(gate=str(gate), more=more))
    return str(path)


def ended(session: Session, within_s: float = 60) -> CellResult:
    """How the detached run ended, without asking for it as a user does."""
    assert session.runs.detached is not None
    return session.runs.detached.ended.result(within_s)


# ------------------------------------------------------------------ cells


def test_what_the_ranks_write_at_once_is_kept_for_the_wait(
    ranks: Session, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    detach = CellRun.detach

    def slowly(run: CellRun, *, by_user: bool = False) -> None:
        detach(run, by_user=by_user)  # so the ranks write before the call returns
        eventually(lambda: all(run.events.written(rank) for rank in run.ranks), 30, "the output")

    monkeypatch.setattr(CellRun, "detach", slowly)
    ranks.run_cell(GATE.format(gate=str(gate)), detach=True)
    assert texts(ranks.wait(0)) == "begun\n"
    gate.touch()
    ranks.wait().raise_for_error()


def test_a_detached_cell_leaves_the_caller_free_and_is_waited_for_later(
    ranks: Session, gate: Path
) -> None:
    result = ranks.run_cell(GATE.format(gate=str(gate)), detach=True)
    assert (result.error, result.pending) == (None, (0, 1))
    begun(ranks)
    stands = ranks.wait(0)
    assert (texts(stands), stands.error, stands.pending) == ("begun\n", None, (0, 1))
    assert texts(ranks.wait(0)) == ""  # what was shown is not news
    assert not ranks.why().wrong
    assert ranks.where().stack(0).frames
    with pytest.raises(
        UsageMistake, match="is still running on ranks 0 and 1, and no rank is paused"
    ):
        ranks.step()
    gate.touch()
    whole = ranks.wait()
    assert (texts(whole), whole.error, whole.pending) == ("begun\nafter the gate\n", None, ())
    again = ranks.wait()
    assert (texts(again), again.error) == (texts(whole), None)
    ranks.run_cell("pass").raise_for_error()
    with pytest.raises(UsageMistake, match=r"nothing to wait for.*%%ddp --detach"):
        ranks.wait()


def test_ranks_that_are_taken_refuse_every_verb_at_once_and_nothing_is_lost(
    ranks: Session, gate: Path
) -> None:
    ranks.run_cell("kept = 'kept'").raise_for_error()
    ranks.run_cell(GATE.format(gate=str(gate)), detach=True)
    # Also before the ranks have said that they began.
    for call in (
        lambda: ranks.run_cell("kept = 'lost'"),
        lambda: ranks.run_cell("kept = 'lost'", detach=True),
        lambda: ranks.run_script(__file__),
        lambda: ranks.push({"kept": "lost"}),
        lambda: ranks.pull("kept"),
    ):
        with pytest.raises(UsageMistake, match=r"still in an earlier cell.*%ddp_wait"):
            call()
    gate.touch()
    ranks.wait().raise_for_error()
    assert ranks.pull("kept") == {0: "kept", 1: "kept"}


def test_an_error_in_a_detached_cell_is_the_results_and_is_diagnosed(ranks: Session) -> None:
    ranks.run_cell("if rank == 1:\n    raise ValueError('boom')\ndist.barrier()", detach=True)
    result = ended(ranks)
    assert ranks.wait().error is not None
    assert isinstance(result.error, (CellFailed, Stuck))
    assert result.diagnosis is not None
    assert result.diagnosis.findings[0].ranks == (1,)


def test_a_hang_of_a_detached_cell_is_found_though_nobody_waits(ranks: Session) -> None:
    ranks.run_cell(HANG, detach=True)
    result = ended(ranks)
    assert isinstance(result.error, Stuck)
    assert result.pending == (0,)
    found = ranks.wait()  # it stands as it stood
    assert isinstance(found.error, Stuck)
    assert found.diagnosis is not None and result.diagnosis is not None
    assert found.diagnosis.headline == result.diagnosis.headline


def test_a_hang_that_another_cell_frees_is_waited_for_to_its_end(ranks: Session) -> None:
    ranks.run_cell(f"{HANG}\nprint('got on')", detach=True)
    assert isinstance(ended(ranks).error, Stuck)
    ranks.run_cell("dist.all_reduce(torch.ones(1))", (1,)).raise_for_error()
    result = ranks.wait()
    assert result.error is None
    assert texts(result).count("got on") == 1


def test_a_cell_that_was_given_back_can_be_waited_for_again(ranks: Session) -> None:
    """Not detached at all: it came back because it hung."""
    assert isinstance(ranks.run_cell(HANG).error, Stuck)
    assert isinstance(ranks.wait().error, Stuck)


def test_abort_ends_a_detached_cell_that_computes(ranks: Session) -> None:
    pids = rank_pids(ranks)
    ranks.run_cell("print('begun')\nwhile True:\n    pass", detach=True)
    begun(ranks)
    assert ranks.abort().snapshot.ready
    assert rank_pids(ranks) == pids
    ranks.run_cell(ALL_REDUCE).raise_for_error()
    result = ranks.wait()
    assert isinstance(result.error, CellFailed)
    assert result.diagnosis is None  # what the user ended needs no culprit


def test_a_restart_that_others_are_in_the_way_of_says_what_it_ended_and_blames_no_rank(
    ranks: Session,
) -> None:
    ranks.run_cell("import time\nprint('begun')\nwhile True:\n    time.sleep(0.1)", detach=True)
    begun(ranks)
    with pytest.raises(UsageMistake) as refused:
        ranks.restart((1,))
    assert str(refused.value).startswith(
        "Rank 1 was ended and has no new process yet. The group needs every rank, and rank 0 is "
        "still in a cell. Free them with their variables: %ddp_abort."
    )
    (finding,) = ranks.why().findings
    assert "Rank 1 was ended by `%ddp_restart` and has no new process yet" in finding.sentence
    assert not finding.evidence, "it was not its own code, another program or a kill -9"
    assert ranks.abort().snapshot.ready
    assert "rank 1 was ended by %ddp_restart" in str(ranks.wait().error)
    assert not ranks.why().findings


def test_held_ranks_are_stepped_while_detached(ranks: Session) -> None:
    ranks.run_cell("dist.barrier()\nprint('one')\ndist.barrier()", hold=True, detach=True)
    table = ranks.wait().steps
    assert table is not None
    assert table.rows[0].text.startswith("barrier")
    assert ranks.step().rows[0].state == "paused"
    assert ranks.step().rows[0].state == "done"
    assert texts(ranks.wait()) == "one\n"


def test_other_ranks_are_free_meanwhile_but_one_run_alone_can_be_detached(
    ranks: Session, gate: Path
) -> None:
    ranks.run_cell(GATE.format(gate=str(gate)), (0,), detach=True)
    ranks.run_cell("mine = rank", (1,)).raise_for_error()
    with pytest.raises(UsageMistake, match="is already detached, on rank 0"):
        ranks.run_cell("mine = 7", (1,), detach=True)
    with pytest.raises(UsageMistake, match="needs every rank"):
        ranks.run_script(__file__, ranks=(1,))
    assert "begun" in eventually(lambda: ranks.output(0), 20, "its output, beside another cell's")
    gate.touch()
    assert texts(ranks.wait()) == "begun\nafter the gate\n"
    assert ranks.pull("mine", (1,)) == {1: 1}


# ------------------------------------------------------------------ scripts


def test_a_detached_script_runs_on_and_gives_the_ranks_their_group_back(
    ranks: Session, tmp_path: Path, gate: Path
) -> None:
    result = ranks.run_script(script(tmp_path, gate), detach=True)
    assert result.pending == (0, 1)
    begun(ranks)
    with pytest.raises(UsageMistake, match=r"still in an earlier cell \(.*job\.py"):
        ranks.run_cell("x = 1")
    gate.touch()
    result = ranks.wait()
    result.raise_for_error()
    assert texts(result) == "begun\nsum 2.0\n"
    ranks.run_cell(ALL_REDUCE).raise_for_error()


def test_a_detached_script_that_hangs_is_diagnosed_and_given_up(
    ranks: Session, tmp_path: Path, gate: Path
) -> None:
    gate.touch()
    path = script(tmp_path, gate, "if dist.get_rank() == 0:\n    dist.barrier()\nelse:\n    "
                  "dist.all_reduce(x)\n")  # fmt: skip
    ranks.run_script(path, detach=True)
    result = ended(ranks)
    assert isinstance(result.error, Stuck) or result.diagnosis is not None
    ranks.abort()
    ranks.run_cell(ALL_REDUCE).raise_for_error()


def test_no_set_up_begins_on_ranks_that_are_still_being_freed(
    ranks: Session, tmp_path: Path, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.run_script(script(tmp_path, gate), detach=True)
    begun(ranks)
    bringup = bring_up_of(ranks)
    free, before, begun_early = bringup.free, bringup.generation, []

    def free_slowly(members: tuple[int, ...]) -> tuple[int, ...]:
        left = free(members)
        begun_early.append(ranks.record.wait_for(lambda: bringup.generation != before, 0.5))
        return left

    monkeypatch.setattr(bringup, "free", free_slowly)
    assert ranks.abort().snapshot.ready
    assert begun_early == [False]
    assert bringup.generation == before, "a script does not touch the session's group"
    ranks.run_cell(ALL_REDUCE).raise_for_error()


def test_a_restart_under_a_detached_script_ends_it_and_sets_the_ranks_up_once(
    ranks: Session, tmp_path: Path, gate: Path
) -> None:
    ranks.run_script(script(tmp_path, gate), detach=True)
    begun(ranks)
    assert ranks.restart().snapshot.ready
    ranks.run_cell(ALL_REDUCE).raise_for_error()
    assert "killed by SIGKILL" in str(ranks.wait().error)
    ranks.run_script(script(tmp_path, gate), detach=True)
    begun(ranks)
    board = ranks.init(InitOptions(world_size=2, device="cpu"), replace=True)
    assert "job.py ran, and was ended by this." in board.snapshot.notes
    ranks.run_cell(ALL_REDUCE).raise_for_error()


def test_a_script_is_stepped_collective_by_collective(
    ranks: Session, tmp_path: Path, gate: Path
) -> None:
    gate.touch()
    result = ranks.run_script(script(tmp_path, gate, "dist.all_reduce(x)\n"), hold=True)
    assert result.error is None and result.steps is not None
    (row,) = result.steps.rows
    assert (row.ranks, row.state) == ((0, 1), "paused")
    assert row.text.startswith("all_reduce of float32 [2] (8 B), job.py, line 7")

    (waiting,) = [row for row in ranks.step((1,)).rows if row.state == "waiting"]
    assert (waiting.ranks, waiting.waits_for) == ((1,), (0,))
    (row,) = ranks.step().rows
    assert (row.state, row.text[:10]) == ("paused", "all_reduce")
    table = ranks.step()
    (row,) = table.rows
    assert (row.ranks, row.state) == ((0, 1), "done")
    assert table.title == "job.py has finished on every rank."
    # The step that ended it also gave the ranks their group back.
    ranks.run_cell(ALL_REDUCE).raise_for_error()
    assert texts(ranks.wait()) == "begun\nsum 2.0\n"


def test_a_held_script_goes_to_its_end_or_is_given_up(
    ranks: Session, tmp_path: Path, gate: Path
) -> None:
    gate.touch()
    for finish in (lambda: ranks.step(to="end"), ranks.abort):
        ranks.run_script(script(tmp_path, gate, "dist.barrier()\n" * 5), hold=True)
        finish()
        ranks.run_cell(ALL_REDUCE).raise_for_error()


# ------------------------------------------------------------------ interrupts, threads, the end


def test_an_interrupt_of_the_waiting_stops_the_ranks_as_it_stops_a_cell(ranks: Session) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    ranks.run_cell(LONG, detach=True)
    begun(ranks)
    try:
        result = ranks.wait(started=lambda _: os.kill(os.getpid(), signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert isinstance(result.error, CellInterrupted)
    assert "ranks 0 and 1 stopped at cell line 4" in str(result.error)
    ranks.run_cell(ALL_REDUCE).raise_for_error()


def test_of_two_cells_at_once_one_runs_and_the_other_is_refused(ranks: Session) -> None:
    outcomes: list[Any] = []
    together = threading.Barrier(2)

    def run() -> None:
        together.wait(10)
        try:
            outcomes.append(ranks.run_cell("times = times + 1\nimport time\ntime.sleep(0.3)"))
        except UsageMistake as mistake:
            outcomes.append(mistake)

    for number in range(1, 4):
        ranks.run_cell("times = 0").raise_for_error()
        outcomes.clear()
        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        refused = [each for each in outcomes if isinstance(each, UsageMistake)]
        assert len(outcomes) == 2, f"try {number}: {outcomes}"
        assert len(refused) == 1, f"try {number}: {outcomes}"
        assert "still in an earlier cell" in str(refused[0])
        assert ranks.pull("times") == {0: 1, 1: 1}


def running_in_a_thread(call: Callable[[], CellResult]) -> tuple[threading.Thread, list[Any]]:
    """Runs `call` beside the test; what comes of it, or is raised."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:  # noqa: BLE001  # the test looks at it
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


@pytest.mark.parametrize("what", ["cell", "hang", "script"])
def test_a_run_under_which_the_session_is_shut_down_says_so(
    session: Session, what: str, tmp_path: Path, gate: Path
) -> None:
    session.init(InitOptions(world_size=2, device="cpu"))
    thread, outcome = running_in_a_thread(
        {
            "cell": lambda: session.run_cell(LONG),
            "hang": lambda: session.run_cell(f"print('begun')\n{HANG}", wait="forever"),
            "script": lambda: session.run_script(script(tmp_path, gate)),
        }[what]
    )
    begun(session)
    session.shutdown()
    thread.join(30)
    assert not thread.is_alive()
    (result,) = outcome
    assert isinstance(result, CellResult), result
    assert isinstance(result.error, SessionLost)
    assert str(result.error) == "The ranks were shut down. Start again: %ddp_init"
    assert "begun" in texts(result)
    with pytest.raises(NoSession):
        session.run_cell("x = 1")


def test_what_a_detached_cell_wrote_is_there_when_the_session_was_lost(session: Session) -> None:
    session.init(InitOptions(world_size=2, device="cpu"))
    session.run_cell(LONG, detach=True)
    begun(session)
    os.kill(cluster_of(session).controller_pid, signal.SIGKILL)
    result = session.wait()
    assert isinstance(result.error, SessionLost)
    assert "the ipyparallel controller" in str(result.error).lower()
    assert texts(result) == "begun\n"
    session.init(InitOptions(world_size=2, device="cpu"))
    session.run_cell(ALL_REDUCE).raise_for_error()
    assert session.record.snapshot.with_status(Status.READY) == (0, 1)
