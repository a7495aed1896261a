"""Scripts of real reports, run unchanged as torchrun would: cause and culprits are found."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import eventually

from ddp_notebook.errors import CellFailed, Stuck
from ddp_notebook.model import Diagnosis
from ddp_notebook.session import InitOptions, Session

CASES = Path(__file__).parent.parent / "cases"
LINES = (CASES / "expected.jsonl").read_text().splitlines()
EXPECTED = {case["id"]: case for case in map(json.loads, LINES)}
STALLED = ("c001", "c004", "c007", "c008", "c011", "c019")
HANGING = ("c024", "c026", "c027", "c034", "c039", "c040", "c044", "c050", "c073")
SOON_S = 15.0


class Sessions:
    """A session for each number of ranks, one at a time; started when it is first needed."""

    def __init__(self) -> None:
        self.session: Session | None = None

    def of(self, world_size: int) -> Session:
        """The session of so many ranks, all of them ready."""
        made = self.session
        if made is None or made.record.snapshot.world_size != world_size:
            self.close()
            made = self.session = Session()
            made.init(InitOptions(world_size=world_size, device="cpu"))
        made.abort()
        if not made.ready:
            made.init(made.options)
        return made

    def close(self) -> None:
        """End the ranks."""
        if self.session is not None:
            self.session.shutdown()
            self.session = None


@pytest.fixture
def sessions() -> Iterator[Sessions]:
    """Sessions that end with the test."""
    made = Sessions()
    yield made
    made.close()


def check(diagnosis: Diagnosis, name: str) -> None:
    """The diagnosis is what is known of the case."""
    expected = EXPECTED[name]["expected"]
    everyone = list(range(EXPECTED[name]["nproc"]))
    accepted = [everyone if each == "all" else each for each in expected["accept_culprits"]]
    first = diagnosis.findings[0]
    assert first.category.value == expected["category"], diagnosis
    assert list(first.ranks) in accepted, diagnosis
    assert first.remedy and first.evidence


def run(session: Session, name: str) -> Any:
    """The result of a case, with the store in rank 0."""
    return session.run_script(str(CASES / f"{name}.py"), store="rank0")


def of_size(names: Sequence[str], world_size: int) -> list[str]:
    """The cases for so many ranks."""
    return [name for name in names if EXPECTED[name]["nproc"] == world_size]


@pytest.mark.parametrize("world_size", [2, 3])
def test_cases_that_stall_are_ended_with_their_cause(sessions: Sessions, world_size: int) -> None:
    names = of_size(STALLED, world_size)
    assert names
    for name in names:
        result = run(sessions.of(world_size), name)
        # A stale file (c011) does no harm when the ranks are lucky; it is found all the same.
        assert isinstance(result.error, (Stuck, CellFailed)) or name == "c011", result.error
        assert result.diagnosis is not None, f"{name}: {result.error}"
        check(result.diagnosis, name)


@pytest.mark.parametrize("world_size", [2, 3])
def test_cases_that_hang_in_a_collective_are_ended_with_their_cause(
    sessions: Sessions, world_size: int
) -> None:
    names = of_size(HANGING, world_size)
    assert names
    for name in names:
        result = run(sessions.of(world_size), name)
        assert isinstance(result.error, (Stuck, CellFailed)), f"{name}: {result.error}"
        assert result.diagnosis is not None, f"{name}: {result.error}"
        check(result.diagnosis, name)


def test_a_rank_that_is_killed_is_told_from_those_that_lose_it(sessions: Sessions) -> None:
    result = run(sessions.of(3), "c023")
    # The others lose their connection, mostly before it is seen that they wait for nobody.
    assert isinstance(result.error, (CellFailed, Stuck)) and result.diagnosis is not None
    check(result.diagnosis, "c023")


def test_metrics_that_are_added_up_in_another_order_are_found_though_nothing_hangs(
    sessions: Sessions,
) -> None:
    result = run(sessions.of(3), "c037")
    assert result.error is None and result.diagnosis is not None
    check(result.diagnosis, "c037")


@pytest.mark.parametrize("world_size", [2, 3])
def test_healthy_scripts_get_no_finding(sessions: Sessions, world_size: int) -> None:
    names = of_size(("h01", "h02", "h03", "h04"), world_size)
    assert names
    for name in names:
        result = run(sessions.of(world_size), name)
        assert result.error is None, f"{name}: {result.error}"
        assert result.diagnosis is None, f"{name}: {result.diagnosis}"


def test_a_rank_that_is_late_is_called_busy_and_can_be_given_up(sessions: Sessions) -> None:
    session = sessions.of(3)
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.append(run(session, "c010")), name="script", daemon=True
    )
    thread.start()

    def seen() -> bool:
        # Not in init_process_group any more, where on a busy machine it may be late as well.
        diagnosis = session.why()
        loads = "c010.py, line 11" in (diagnosis.doing or {}).get(2, "")
        found = diagnosis.findings
        return loads and bool(found) and found[0].waiting == (0, 1)

    eventually(seen, SOON_S, "ranks 0 and 1 wait for rank 2")
    diagnosis = session.why()
    check(diagnosis, "c010")
    assert not diagnosis.wrong, "it is late, not stuck"
    assert not results, "the script goes on"
    session.abort()
    thread.join(SOON_S)
    assert isinstance(results[0].error, CellFailed)
    assert session.ready, "the ranks have a group again"
