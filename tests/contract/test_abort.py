"""Giving up: whatever ranks are stuck in, the notebook is back at once and setup works again."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from results import rank_pids
from support import eventually, shared_session

from ddp_notebook.errors import SetupFailed, Stuck
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.model import Category, CellStarted, Event, Stage, Status
from ddp_notebook.session import InitOptions, Session
from ddp_notebook.session import bring_up as bringup
from ddp_notebook.testing import processes_of

OPTIONS = InitOptions(world_size=3, device="cpu")
BACK_WITHIN_S = 4.0
"""2 s are promised on a quiet machine (see the benchmarks)."""
MISSING = """\
import os
import torch.distributed as dist

if os.environ["RANK"] != "1":
    dist.init_process_group("gloo")
"""
TYPO = {rank: {"MASTER_ADDR": "no-such-host.invalid"} for rank in range(3)}
JOINS = """\
from datetime import timedelta
import torch.distributed as dist

dist.init_process_group("gloo")
"""
BUSY = """\
n = 0
while True:
    n += 1
"""
SKIPS_ONE = """\
for step in range(3):
    if rank != 1 or step != 1:
        work = dist.all_reduce(torch.ones(4), async_op=True)
if rank == 0:
    work.wait()
"""
NEVER_COMES = """
from ddp_notebook.rank.setup import connecting
from ddp_notebook.rank.setup.errors import StageError
await_keys = connecting.StoreClient.await_keys
def never(self, store, keys, plan):
    while not self._main_thread.abort.wait(0.02):
        pass
    raise StageError("aborted", "")
connecting.StoreClient.await_keys = never
"""
COMES_AGAIN = "connecting.StoreClient.await_keys = await_keys"


@pytest.fixture(scope="module")
def shared(nothing_left_behind_by_the_module: None) -> Iterator[Session]:
    """One session with three ranks for all tests here."""
    with shared_session(OPTIONS) as made:
        yield made


@pytest.fixture
def session(shared: Session) -> Session:
    """The session, its ranks set up and with a variable each."""
    if not shared.record.snapshot.ready:
        shared.set_up(OPTIONS)
    shared.push({"kept": "kept"})
    return shared


def abort_in_time(session: Session) -> None:
    """Give up; afterwards no rank is in anything."""
    started = time.monotonic()
    board = session.abort()
    assert time.monotonic() - started < scaled_for_load(BACK_WITHIN_S)
    inside = board.snapshot.with_status(Status.SETTING_UP, Status.RUNNING, Status.DEAD)
    assert not inside, board.snapshot.ranks


def goes_on(session: Session, keeping: tuple[int, ...] = (0, 1, 2)) -> None:
    """Setup works in the same session; these ranks have what they had."""
    if not session.ready:
        session.init(OPTIONS)
    eventually(lambda: session.record.snapshot.ready, 5, "every rank is free")
    session.run_cell("x = torch.ones(1)\ndist.all_reduce(x)\nassert x == 3").raise_for_error()
    assert session.pull("kept", keeping) == dict.fromkeys(keeping, "kept")


def ctrl_c(
    call: Callable[[], object],
    when: Callable[[], object],
    kept: str = "They keep their variables.",
) -> float:
    """Interrupt `call` as Ctrl-C does, once `when` is true; seconds from then until it is back.

    The interrupt must not reach the caller as anything but SetupFailed.
    """
    over = threading.Event()
    sent_at: list[float] = []
    problems: list[str] = []

    def press() -> None:
        try:
            eventually(lambda: over.is_set() or when(), 15, "the setup to stall")
        except AssertionError as problem:
            problems.append(str(problem))
        while not over.is_set():
            sent_at.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)
            over.wait(10)

    thread = threading.Thread(target=press, name="ctrl-c", daemon=True)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        with pytest.raises(SetupFailed) as caught:
            call()
        back_at = time.monotonic()
        over.set()
        thread.join(30)
    finally:
        over.set()  # or the interrupts of a test that fails go on into those that follow
        signal.signal(signal.SIGINT, before)
    assert not problems, problems
    text = str(caught.value)
    assert text.startswith(f"Setup was interrupted. The ranks are idle. {kept}")
    assert "%ddp_init" in text
    board = caught.value.board
    assert board is not None
    inside = [s.rank for s in board.snapshot.ranks if s.entering and s.status is Status.SETTING_UP]
    assert not inside, "every rank is idle"
    return back_at - sent_at[0]


def script(folder: Path, source: str) -> str:
    path = folder / "train.py"
    path.write_text(source)
    return str(path)


# --------------------------------------------------------------------------- abort


@pytest.mark.parametrize("store", ["session", "rank0"])
@pytest.mark.parametrize(
    "settings",
    [{1: {"MASTER_PORT": "1"}}, {1: {"RANK": "0"}}, {0: {"MASTER_ADDR": "203.0.113.7"}}],
    ids=["wrong port", "duplicate rank", "unreachable"],
)
def test_a_set_up_that_is_stuck_is_given_up_and_works_the_next_time(
    session: Session, settings: dict[int, dict[str, str]], store: str
) -> None:
    before = rank_pids(session)
    with pytest.raises(SetupFailed):
        session.set_up(replace(OPTIONS, settings=settings, store=store))
    abort_in_time(session)
    goes_on(session)
    assert rank_pids(session) == before


def test_a_script_that_is_stuck_is_given_up_and_the_session_has_its_group_again(
    session: Session, tmp_path: Path
) -> None:
    before = rank_pids(session)
    result = session.run_script(script(tmp_path, MISSING), store="rank0")
    assert isinstance(result.error, Stuck)
    abort_in_time(session)
    assert session.ready
    goes_on(session)
    assert rank_pids(session) == before
    assert session.why().findings == ()


def test_a_script_whose_master_has_no_address_is_given_up_in_place(
    session: Session, tmp_path: Path
) -> None:
    before = rank_pids(session)
    result = session.run_script(script(tmp_path, JOINS), settings=TYPO)
    assert isinstance(result.error, Stuck) and result.diagnosis is not None
    (finding,) = result.diagnosis.findings
    assert (finding.category, finding.ranks) == (Category.UNREACHABLE_MASTER, (0, 1, 2))
    abort_in_time(session)
    goes_on(session)
    assert rank_pids(session) == before


def test_a_script_whose_master_has_no_address_ends_with_torchs_error_after_its_time(
    session: Session, tmp_path: Path
) -> None:
    soon = JOINS.replace('"gloo"', '"gloo", timeout=timedelta(seconds=1)')
    result = session.run_script(script(tmp_path, soon), settings=TYPO, wait="forever")
    assert "DistNetworkError" in str(result.error)
    goes_on(session)


def test_a_script_that_is_busy_is_given_up_while_it_runs(session: Session, tmp_path: Path) -> None:
    before = rank_pids(session)
    path = script(tmp_path, BUSY)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(session.run_script, path)

        def there() -> bool:
            states = session.record.snapshot.ranks
            return all(s.status is Status.RUNNING and "train.py" in s.doing for s in states)

        try:
            eventually(there, 10, "every rank in the script")
        finally:
            abort_in_time(session)
        error = running.result(10).error
    assert error is not None
    assert re.search(r"KeyboardInterrupt|interrupted", str(error)), error
    goes_on(session)
    assert rank_pids(session) == before


def test_a_rank_that_did_not_wait_for_its_last_collective_gives_up_its_group_at_once(
    session: Session,
) -> None:
    """gloo's group, destroyed, waits for it: for half an hour, in a rank that nobody frees."""
    before = rank_pids(session)
    result = session.run_cell(SKIPS_ONE)
    assert isinstance(result.error, Stuck), result.error
    abort_in_time(session)
    goes_on(session)
    assert rank_pids(session) == before


def test_giving_up_where_nothing_is_stuck_keeps_everything(session: Session) -> None:
    before = rank_pids(session)
    abort_in_time(session)
    assert session.ready
    goes_on(session)
    assert rank_pids(session) == before


def test_one_rank_can_be_freed_alone(session: Session) -> None:
    session.set_up(replace(OPTIONS, step=True))
    session.step((0, 2), "rendezvous")
    session.abort((0,))
    states = session.record.snapshot.ranks
    assert states[0].status is Status.FAILED
    assert states[2].status is Status.SETTING_UP, "the other one goes on waiting"
    abort_in_time(session)
    goes_on(session)


# --------------------------------------------------------------------------- interrupts


def test_an_interrupt_of_a_set_up_that_no_rule_explains_gives_the_notebook_back(
    session: Session,
) -> None:
    before = rank_pids(session)
    session.run_cell(NEVER_COMES, ranks=(1,)).raise_for_error()

    def stalled() -> bool:
        states = session.record.snapshot.ranks
        return all(states[rank].entering is Stage.PROCESS_GROUP for rank in (0, 2))

    try:
        assert ctrl_c(lambda: session.set_up(OPTIONS), stalled) < scaled_for_load(BACK_WITHIN_S)
    finally:
        with contextlib.suppress(Exception):
            session.run_cell(COMES_AGAIN, ranks=(1,))
    goes_on(session)
    assert rank_pids(session) == before


def test_an_interrupt_of_a_set_up_that_waits_for_a_silent_rank_gives_the_notebook_back(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However busy the machine is: a stopped process will not come out, and is not waited for.
    monkeypatch.setattr(bringup, "scaled_for_load", lambda seconds: 60.0 * seconds)
    before = rank_pids(session)

    def waits() -> bool:
        return session.record.snapshot.ranks[0].entering is Stage.RENDEZVOUS

    os.kill(before[1], signal.SIGSTOP)
    kept = "Rank 1 could not be unblocked. Its process was replaced; its variables are lost."
    assert ctrl_c(lambda: session.set_up(OPTIONS), waits, kept) < scaled_for_load(BACK_WITHIN_S)
    goes_on(session, (0, 2))
    after = rank_pids(session)
    assert (after[0], after[2]) == (before[0], before[2])
    assert after[1] != before[1], "nothing but a new process could free it"


def test_a_rank_whose_word_that_it_began_is_late_is_freed_too(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = processes_of(session).receiver
    source = receiver._sources[receiver.source.encode()]
    receive = source.receive
    given_up = threading.Event()

    def late(events: Sequence[Event]) -> None:
        if any(isinstance(event, CellStarted) for event in events):
            given_up.wait(20)
        receive(events)

    monkeypatch.setattr(source, "receive", late)
    before = rank_pids(session)
    with ThreadPoolExecutor(2) as pool:
        hung = pool.submit(
            session.run_cell, "if rank == 0: dist.all_reduce(torch.ones(1))", wait="forever"
        )
        eventually(lambda: session.why().doing[0].startswith("waiting"), 20, "rank 0 waits")
        aborted = pool.submit(session.abort)
        eventually(lambda: any(run.aborted for run in session.runs.all), 20, "it is given up")
        given_up.set()
        aborted.result(30)
        hung.result(30)
    assert rank_pids(session) == before
    goes_on(session)
