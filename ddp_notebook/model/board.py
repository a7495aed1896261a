"""What `%ddp_status` returns: the session as rows of ranks in the same state."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ddp_notebook.model.ranks import Ranks
from ddp_notebook.model.stages import Stage
from ddp_notebook.model.state import Snapshot, Status


class Role(StrEnum):
    """What a lane is in the whole picture: what the eye should find first."""

    CULPRIT = "culprit"
    """A finding says that it is their doing."""
    LATE = "late"
    """The others wait for them, and they work."""
    DEAD = "dead"
    FAILED = "failed"
    SILENT = "silent"
    """Not heard for longer than a live rank is ever quiet: nothing is known of them now."""
    VICTIM = "victim"
    """They only wait, for somebody whose doing it is."""
    HELD = "held"
    """They stand until they are stepped."""
    WAITING = "waiting"
    BUSY = "busy"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class Lane:
    """One rank, or several in the same state. Times are the session's monotonic clock."""

    ranks: Ranks
    role: Role
    status: Status
    stage: Stage | None
    """The last stage passed."""
    entering: Stage | None
    """The stage these ranks are in, if any."""
    text: str
    """What they do, wait for or died of."""
    waits_for: Ranks = ()
    since_ns: int = 0
    """Since when they are at it; 0 for not known."""
    heard_ns: int = 0
    """When the quietest of them was heard, if that is too long ago; 0 if not."""
    where: str = ""
    """Device, process and host, as far as they are the same."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A line of the user's code and the ranks that stand at it."""

    ranks: Ranks
    place: str
    """``cell 3:6 in save``."""
    callers: tuple[str, ...] = ()
    """The lines through which they came there, the outermost first."""
    lines: tuple[tuple[int, str], ...] = ()
    """The line and those around it, numbered; as far as they are known."""
    line: int = 0
    """Which of them it is."""


@dataclass(frozen=True, slots=True)
class BoardRow:
    """One line of the board: one rank, or several that are in the same state."""

    ranks: Ranks
    status: Status
    stage: Stage | None
    """The last stage passed."""
    entering: Stage | None
    """The stage these ranks are in, if any."""
    text: str
    """What they do, wait for, raised last, or died of."""
    device: str
    pid: int
    """0 when the row is of several ranks."""
    host: str
    age_s: float
    """Seconds since the quietest of them was heard."""
    silent: bool
    """True when that is longer than a live rank is ever quiet."""


@dataclass(frozen=True, slots=True)
class Board:
    """The session at one moment, arranged for drawing. What `%ddp_status` returns."""

    headline: str
    rows: tuple[BoardRow, ...]
    notes: tuple[str, ...]
    """What was decided for the user, then what to do about what went wrong."""
    snapshot: Snapshot
