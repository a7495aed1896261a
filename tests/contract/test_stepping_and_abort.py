"""Setup step by step on real ranks, and setup that is given up."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from results import rank_pids
from support import eventually, pids_of, shared_session

from ddp_notebook.errors import SetupFailed, UsageMistake
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.model import Status
from ddp_notebook.model.events import Event, StageStarted
from ddp_notebook.rank import calls
from ddp_notebook.session import InitOptions, Session
from ddp_notebook.session.record import Record
from ddp_notebook.testing import cluster_of

WITHIN_S = 4.0
"""Two seconds on a quiet machine."""


@pytest.fixture(scope="module")
def shared(nothing_left_behind_by_the_module: None) -> Iterator[Session]:
    """Three ranks that stand before setup, whatever a test does with them."""
    with shared_session(options(step=True)) as made:
        yield made


@pytest.fixture
def session(shared: Session) -> Session:
    """The ranks, paused before the first stage again."""
    shared.set_up(options(step=True))
    return shared


def options(**more: object) -> InitOptions:
    """Three ranks on CPUs, with a timeout that is too short for a person who thinks."""
    return InitOptions(**{"world_size": 3, "device": "cpu", "timeout_s": 3.0, **more})  # type: ignore[arg-type]


def test_stepping_begins_before_the_first_stage_and_ends_verified(session: Session) -> None:
    assert session.record.snapshot.with_status(Status.PAUSED) == (0, 1, 2)
    passed = []
    for _ in range(5):
        table = session.step()
        passed.append({row.passed for row in table.rows})
    assert passed == [
        {"environment"},
        {"store"},
        {"rendezvous"},
        {"process-group"},
        {"verified"},
    ]
    assert session.ready
    session.run_cell("x = torch.ones(1); dist.all_reduce(x); assert x == 3").raise_for_error()
    with pytest.raises(UsageMistake, match="There is nothing to step"):
        session.step()


def test_a_step_waits_for_ranks_that_have_not_left_their_pause_yet(session: Session) -> None:
    """As on a busy machine: what brings the step to the ranks gets no core for a while."""
    os.kill(pids_of(session).controller, signal.SIGSTOP)  # the session wakes it
    table = session.step()
    assert {row.passed for row in table.rows} == {"environment"}


def test_a_step_waits_for_what_ranks_say_of_it_though_their_calls_have_ended(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy machine: the thread that reads the ranks' events gets no core for a while."""
    add = Record.add

    def late(record: Record, events: Sequence[Event]) -> None:
        if any(isinstance(event, StageStarted) for event in events):
            threading.Event().wait(2)
        add(record, events)

    monkeypatch.setattr(Record, "add", late)
    table = session.step()
    assert {row.passed for row in table.rows} == {"environment"}


HOLDS_PYTHON = """
import ctypes, pathlib, threading, time

def hold():
    while not pathlib.Path({go!r}).exists():
        time.sleep(0.005)
    pathlib.Path({holds!r}).touch()
    ctypes.PyDLL(None).usleep(4_000_000)  # no other thread of this process runs meanwhile

threading.Thread(target=hold, daemon=True).start()
"""


def test_a_step_waits_for_a_rank_that_does_not_answer_for_a_moment(
    session: Session, tmp_path: Path
) -> None:
    """As on a busy machine; the other ranks have arrived by then, and stand still."""
    go, holds = tmp_path / "go", tmp_path / "holds"
    source = HOLDS_PYTHON.format(go=str(go), holds=str(holds))
    session.run_cell(source, (1,)).raise_for_error()
    go.touch()
    eventually(holds.exists, 30, "rank 1 holds Python")
    table = session.step()
    assert [row.passed for row in table.rows] == ["environment"] * 3


def test_a_step_does_not_wait_for_a_rank_whose_process_is_stopped(session: Session) -> None:
    os.kill(rank_pids(session)[1], signal.SIGSTOP)
    began_s = time.monotonic()
    try:
        table = session.step()
    finally:
        os.kill(rank_pids(session)[1], signal.SIGCONT)
    assert [row.passed for row in table.rows] == ["environment", "launched", "environment"]
    assert time.monotonic() - began_s < scaled_for_load(10), "15 s if it only does not answer"


def test_a_rank_that_is_held_back_is_waited_for_and_nothing_times_out(session: Session) -> None:
    session.step(to="store")
    table = session.step((0, 2))
    assert [row.state for row in table.rows] == ["waiting", "paused", "waiting"]
    assert [row.waits_for for row in table.rows] == [(1,), (), (1,)]
    assert "join/1" in table.rows[0].text
    assert table.next_call == "%ddp_step --ranks 1"
    began = time.monotonic()
    eventually(lambda: time.monotonic() - began > 3.5, 10, "the timeout of a plain setup")
    assert not session.why().wrong
    session.run_cell("held = 'looked at'", (1,)).raise_for_error()
    table = session.step((1,))
    assert {row.state for row in table.rows} == {"paused"}
    session.step(to="verified")
    assert session.ready
    assert session.pull("held", (1,)) == {1: "looked at"}


def test_ranks_that_wait_when_a_step_begins_are_taken_along_to_its_goal(session: Session) -> None:
    session.step(to="store")
    assert [row.state for row in session.step((0, 2)).rows] == ["waiting", "paused", "waiting"]
    table = session.step(to="process-group")
    assert [(row.passed, row.state) for row in table.rows] == [("process-group", "paused")] * 3
    session.step(to="end")
    assert session.record.snapshot.ready


def test_a_variable_can_be_mended_between_two_steps(session: Session) -> None:
    session.set_up(options(step=True, settings={1: {"MASTER_PORT": "1"}}))
    session.step(to="environment")
    table = session.step()
    assert table.rows[1].state == "waiting"
    assert "nothing answers" in table.rows[1].text
    found = session.why()
    assert found.findings[0].ranks == (1,)
    session.set_up(options())
    assert session.ready


def test_wrong_calls_of_step_say_what_to_type(session: Session) -> None:
    with pytest.raises(UsageMistake, match="Rank 7 does not exist"):
        session.step((7,))
    with pytest.raises(UsageMistake, match="--to must be one of environment"):
        session.step(to="nowhere")
    session.step((0,), to="store")
    session.step((0,))
    with pytest.raises(UsageMistake, match="Rank 0 is not paused; ranks 1 and 2 can be stepped"):
        session.step((0,))


def test_a_set_up_that_stalls_can_be_given_up_and_the_processes_live(session: Session) -> None:
    pids = rank_pids(session)
    session.run_cell("kept = 1").raise_for_error()
    with pytest.raises(SetupFailed) as caught:
        session.set_up(options(settings={2: {"RANK": "1"}}))
    assert caught.value.diagnosis is not None
    with pytest.raises(UsageMistake, match="still in setup"):
        session.run_cell("1")
    began = time.monotonic()
    board = session.abort()
    assert time.monotonic() - began < scaled_for_load(WITHIN_S)
    assert not board.snapshot.with_status(Status.SETTING_UP, Status.RUNNING)
    session.run_cell("kept += 1").raise_for_error()
    session.init(options())
    assert session.ready
    assert rank_pids(session) == pids
    assert set(session.pull("kept").values()) == {2}


def test_a_rank_that_died_in_set_up_comes_back_while_the_others_wait_for_it(
    session: Session,
) -> None:
    before = rank_pids(session)
    os.kill(before[1], signal.SIGKILL)
    eventually(lambda: session.record.snapshot.ranks[1].status is Status.DEAD, 5)
    session.step((0, 2), "rendezvous")
    assert "%ddp_restart --ranks 1" in session.why().findings[0].remedy
    session.restart((1,))
    assert session.ready
    after = rank_pids(session)
    assert (after[0], after[2]) == (before[0], before[2])


def test_an_interrupt_ends_a_set_up_that_waits_and_the_next_one_works(session: Session) -> None:
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    pressed_at: list[float] = []

    def press() -> None:
        eventually(lambda: session.record.snapshot.with_status(Status.SETTING_UP), 10)
        pressed_at.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    # Nothing answers at an address of documentation: nothing is decided before the interrupt.
    stalled = options(settings={r: {"MASTER_ADDR": "203.0.113.9"} for r in range(3)})
    thread = threading.Thread(target=press, name="ctrl-c", daemon=True)
    try:
        thread.start()
        with pytest.raises(SetupFailed, match=r"interrupted|203"):
            session.set_up(stalled)
    finally:
        thread.join(10)
        signal.signal(signal.SIGINT, previous)
    assert time.monotonic() - pressed_at[0] < scaled_for_load(WITHIN_S)
    session.init(options())
    assert session.ready


def test_a_blocked_rank_answers_while_its_main_thread_cannot(session: Session) -> None:
    session.step((0,), to="rendezvous")
    began = time.monotonic()
    answers = cluster_of(session).ask((0, 1, 2), calls.REPORT, calls.Nothing(), 5.0)
    assert time.monotonic() - began < scaled_for_load(WITHIN_S)
    assert [answers[rank].activity for rank in range(3)] == ["waiting", "held", "held"]
    unknown = cluster_of(session).ask(
        (0,),
        calls.Question("what is not asked", calls.Nothing, calls.Nothing),
        calls.Nothing(),
        5.0,
    )
    assert "cannot be asked" in unknown[0].why
