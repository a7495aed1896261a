"""The fault lab on real ranks: each fault is found as it is catalogued, and repaired in place."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from support import eventually, need_lab_hosts, shared_session

from ddp_notebook.faults import FAULTS, Kind
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.model import Diagnosis
from ddp_notebook.session import InitOptions, Session
from ddp_notebook.testing import processes_of

WORLD_SIZE = 3
EVERYBODY = tuple(range(WORLD_SIZE))
SHOWN_WITHIN_S = 6.0
"""2 s are promised on a quiet machine (see the benchmarks)."""
LATE_S = 2.5
"""How long the late and the starved rank take here."""
STALL_LATER = ("late-rank", "starved-rank", "short-timeout", "stale-file")
"""What these ranks do before they stall takes seconds."""
WAIT_FOR_A_FILE = ("stale-file", "file-not-writable")
"""torch polls a file, or waits to be connected to: there is no connection to shut down."""


@pytest.fixture(scope="module")
def shared(nothing_left_behind_by_the_module: None) -> Iterator[Session]:
    """One session with three ranks for all tests here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDP_FAULT_SECONDS", str(LATE_S))
        with shared_session(InitOptions(world_size=WORLD_SIZE, device="cpu")) as made:
            yield made


@pytest.fixture
def session(shared: Session) -> Session:
    """The session, its ranks set up whatever the test before left."""
    if not shared.record.snapshot.ready:
        shared.set_up(InitOptions(world_size=WORLD_SIZE, device="cpu"))
    return shared


def pids(session: Session) -> dict[int, int]:
    return {state.rank: state.pid for state in session.record.snapshot.ranks}


def check(name: str, diagnosis: Diagnosis | None) -> None:
    """The first finding is the catalogued one, and says what a person needs."""
    assert diagnosis is not None, "nothing was found"
    assert diagnosis.findings, diagnosis
    first = diagnosis.findings[0]
    assert first.category is FAULTS[name].category, diagnosis
    assert first.ranks == FAULTS[name].culprits_of(WORLD_SIZE), diagnosis
    assert first.passing is FAULTS[name].passes
    assert first.cause, "a finding says what happened"
    assert first.remedy, "a finding says what to do"
    assert "\n" not in first.cause + first.remedy
    assert diagnosis.world_size == WORLD_SIZE
    assert set(diagnosis.doing or {}) == set(EVERYBODY)


@pytest.mark.parametrize("name", WAIT_FOR_A_FILE)
def test_the_files_of_a_fault_are_in_the_sessions_folder_and_new_for_each_run(
    session: Session, name: str
) -> None:
    """A run may have the address of an earlier one, whose files would be another fault."""
    folder = processes_of(session).folder
    before = set(folder.glob("fault-*"))
    session.fault(name)
    (first,) = set(folder.glob("fault-*")) - before
    assert (first / "rendezvous").exists()
    assert not session.repair().error
    assert len(set(folder.glob("fault-*")) - before - {first}) == 1


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_fault_is_found_with_its_culprits_and_repaired_in_place(
    session: Session, name: str
) -> None:
    if FAULTS[name].kind is Kind.HOSTS:
        need_lab_hosts()
    session.push({"kept": name})
    before = pids(session)

    started = time.monotonic()
    injected = session.fault(name)
    shown_after_s = time.monotonic() - started
    check(name, injected.diagnosis)
    assert not injected.repaired
    if name not in STALL_LATER:
        assert shown_after_s < scaled_for_load(SHOWN_WITHIN_S)

    repaired = session.repair()
    assert (repaired.error, repaired.diagnosis) == ("", None)
    assert repaired.repaired
    assert session.ready
    eventually(lambda: session.record.snapshot.ready, 5, "every rank is free")
    session.run_cell("x = torch.ones(1)\ndist.all_reduce(x)\nassert x == 3").raise_for_error()
    if FAULTS[name].kind is Kind.SETTINGS or name in WAIT_FOR_A_FILE:
        assert pids(session) == before, "no rank needed a new process"
    assert bool(repaired.replaced) == (pids(session) != before), "a new process is spoken of"
    survivors = tuple(rank for rank, pid in pids(session).items() if pid == before[rank])
    assert session.pull("kept", survivors) == dict.fromkeys(survivors, name)
