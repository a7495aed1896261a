"""Every fault of the lab: seen for what it is, and repaired in the same session."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from support import spared

from ddp_notebook.errors import UsageMistake
from ddp_notebook.faults import FAULTS, Fault, Kind
from ddp_notebook.session import InitOptions, Session

RANKS = 3
SHOWN_WITHIN_S = 8.0
"""Two seconds on a quiet machine, which the benchmarks measure; tests run on a busy one."""
SLOW = ("late-rank", "starved-rank", "short-timeout", "stale-file")


@pytest.fixture(scope="module")
def session(nothing_left_behind_by_the_module: None) -> Iterator[Session]:
    """Three ranks for all of them."""
    made = Session()
    try:
        made.init(InitOptions(world_size=RANKS, device="cpu"))
        with spared(made):
            yield made
    finally:
        made.shutdown()


@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_a_fault_is_found_and_repaired(session: Session, fault: Fault) -> None:
    session.make_ready()
    session.run_cell("kept = 'by this process'").raise_for_error()
    pids = [state.pid for state in session.record.snapshot.ranks]
    started = time.monotonic()
    result = session.fault(fault.name)
    elapsed_s = time.monotonic() - started
    assert result.diagnosis is not None, "nothing was found"
    first = result.diagnosis.findings[0]
    everyone = tuple(range(RANKS))
    assert first.category is fault.category, result.diagnosis
    if fault.culprits:
        assert first.ranks == (everyone if fault.culprits == (-1,) else fault.culprits)
    assert result.diagnosis.wrong is not fault.passes
    if fault.name not in SLOW:
        assert elapsed_s < SHOWN_WITHIN_S

    repaired = session.repair()
    assert repaired.error == ""
    assert session.ready
    states = session.record.snapshot.ranks
    survivors = tuple(r for r in everyone if states[r].pid == pids[r])
    if survivors:
        kept = session.pull("kept", survivors)
        assert set(kept.values()) == {"by this process"}
    session.run_cell("dist.all_reduce(torch.ones(1))").raise_for_error()


def test_a_fault_of_the_sessions_own_set_up_keeps_every_process(session: Session) -> None:
    session.make_ready()
    pids = [state.pid for state in session.record.snapshot.ranks]
    for name in ("duplicate-rank", "wrong-port", "address-unresolved"):
        assert FAULTS[name].kind is Kind.SETTINGS
        session.fault(name)
        session.repair()
        assert [state.pid for state in session.record.snapshot.ranks] == pids, name


def test_an_unknown_fault_is_answered_with_those_that_are_near(session: Session) -> None:
    with pytest.raises(UsageMistake, match="Did you mean duplicate-rank"):
        session.fault("duplicate-rnk")


def test_every_fault_says_what_it_is_about() -> None:
    for fault in FAULTS.values():
        assert fault.lesson.count(". ") >= 1, f"{fault.name} has two sentences"
        assert fault.title and fault.min_ranks <= RANKS
