"""The value of `%ddp_status`: the session as rows of ranks in the same state."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ddp_notebook.model.ranks import Ranks
from ddp_notebook.model.stages import Stage
from ddp_notebook.model.state import Snapshot, Status


class Role(StrEnum):
    """The role of ranks in the session: what the board highlights first."""

    CULPRIT = "culprit"
    """A finding names them as the cause."""
    LATE = "late"
    """They make progress, and the others wait for them."""
    DEAD = "dead"
    FAILED = "failed"
    SILENT = "silent"
    """Their last message is too old for a live rank: their current state is unknown."""
    PAUSED = "paused"
    """They stay where they are until `%ddp_step`."""
    WAITING = "waiting"
    """They wait for other ranks."""
    RUNNING = "running"
    RAISED = "raised"
    """They accept the next cell; their last one raised."""
    REFUSED = "refused"
    """The same; it raised because a collective does not match the other ranks'."""
    READY = "ready"
    GROUPLESS = "groupless"
    """They accept the next cell; their code destroyed their process group."""
    ENDED = "ended"
    """They ended with their session."""


@dataclass(frozen=True, slots=True)
class BoardRow:
    """One line of the board: one rank, or several in the same state.

    Every view renders this. Times ending in ``_ns`` are the session's monotonic clock.
    """

    ranks: Ranks
    status: Status
    stage: Stage | None
    """The last stage passed."""
    entering: Stage | None
    """The stage these ranks are in, if any."""
    text: str
    """Their activity, or what they wait for, raised or died of."""
    device: str
    """For several ranks only its kind: ``cuda``."""
    pid: int
    """0 when the row is of several ranks."""
    host: str
    age_s: float
    """Seconds since the last message of the rank that has been silent for longest."""
    silent: bool
    """True if that is longer than a live rank is ever silent."""
    role: Role = Role.READY
    waits_for: Ranks = ()
    since_ns: int = 0
    """When they began what `text` says; 0 if unknown."""
    word: str = ""
    """Their state in a word, if it differs from `status`."""
    heard_ns: int = 0
    """When the quietest of silent ranks sent its last message; 0 if they are not silent."""
    staged: bool = True
    """False of an external job's ranks: the stages of their setup are not known."""

    @property
    def gone(self) -> bool:
        """True if these ranks failed or died: they make no more progress by themselves."""
        return self.status in (Status.FAILED, Status.DEAD)

    @property
    def stages_passed(self) -> int:
        """How many stages these ranks have passed; a repeated setup starts again from 0.

        All, where none is known: so nothing is drawn of them.
        """
        if not self.staged:
            return len(Stage)
        if self.entering is not None:
            return self.entering.number - 1
        return self.stage.number if self.stage else 0

    @property
    def process(self) -> str:
        """Where these ranks run: ``cuda:1 · pid 4712 · node-17``, as far as it is known."""
        parts = (self.device, f"pid {self.pid}" if self.pid else "", self.host)
        return " · ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Board:
    """The session at one moment, arranged for drawing. What `%ddp_status` returns."""

    headline: str
    rows: tuple[BoardRow, ...]
    notes: tuple[str, ...]
    """Decisions made for the user, then remedies for problems."""
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class StackLocation:
    """A line of the user's code and the ranks that are in it."""

    ranks: Ranks
    call_site: str
    """``cell 3, line 6, in save``."""
    callers: tuple[str, ...] = ()
    """The lines that led there, the outermost first."""
    lines: tuple[tuple[int, str], ...] = ()
    """The line and those around it, numbered, if the source is available."""
    line: int = 0
    """Which of them it is."""
