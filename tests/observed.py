"""Four ranks that are observed, and what they wrote down of their collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ddp_notebook.model import Collectives, Status
from ddp_notebook.session import Session
from ddp_notebook.testing import processes_of


@contextlib.contextmanager
def waiting_for_a_cell(session: Session) -> Iterator[Session]:
    """Ranks that are alive and wait for a cell, before and after."""
    _revive(session)
    yield session
    _revive(session)


def _revive(session: Session) -> None:
    dead = session.record.snapshot.with_status(Status.DEAD)
    if dead:
        session.restart(dead)
    if not session.record.snapshot.ready:
        session.abort()


def issued(session: Session) -> Collectives:
    """What the ranks issued in the last cell."""
    assert session.runs.current is not None
    return processes_of(session).logs.read((0, 1, 2, 3), session.runs.current.cell)


def run(session: Session, source: str) -> Collectives:
    session.run_cell(source).raise_for_error()
    return issued(session)
