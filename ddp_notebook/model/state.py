"""The state that events fold into: of each rank, of the session, and its output."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ddp_notebook.model.codec import OMIT_DEFAULT
from ddp_notebook.model.events import AnyEvent, OutputKind
from ddp_notebook.model.ranks import Ranks
from ddp_notebook.model.stages import Stage


class Status(StrEnum):
    """The status of a rank."""

    STARTING = "starting"
    """Its process was requested; the rank has sent no event yet."""
    SETTING_UP = "setting up"
    """It is in a stage of setup."""
    PAUSED = "paused"
    """It is paused before a stage of setup until it is stepped."""
    READY = "ready"
    """Set up and idle."""
    RUNNING = "running"
    """It runs a cell."""
    FAILED = "failed"
    """Its setup failed; its variables live."""
    DEAD = "dead"
    """Its process is gone."""


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of one rank. `heard_ns` (session's monotonic clock) is when it last spoke."""

    rank: int
    status: Status = Status.STARTING
    stage: Stage | None = None
    """The last stage it passed."""
    entering: Stage | None = None
    """The stage it is in, if any."""
    detail: str = ""
    device: str = ""
    pid: int = 0
    host: str = ""
    cell: int = 0
    """The prompt's number of the cell it runs, or ran last; 0 for the benchmark."""
    doing: str = ""
    cause: str = ""
    remedy: str = ""
    raised: str = ""
    """The error of its last cell, until it runs the next: ``KeyError: 'x'``."""
    refused: bool = False
    """The error was a Mismatch: its collective does not match the other ranks'."""
    no_group: bool = False
    """Its last cell destroyed its process group, and made no other one."""
    restarting: bool = False
    """Its process is being replaced."""
    exit_code: int | None = None
    last_words: str = ""
    peak_bytes: int = 0
    oom_kills: int = -1
    lost_events: int = 0
    limits: tuple[str, ...] = ()
    """The features of ours that are disabled in its process, and why."""
    heard_ns: int = 0
    since_ns: int = 0
    """When its current activity began: setup, death, idleness, or the line of its cell that it
    last reported; the session's monotonic clock."""


@dataclass(frozen=True, slots=True)
class Loading:
    """torch is being loaded, once for all ranks of a host: when that began."""

    since_ns: int
    hosts: Mapping[str, str] = field(default_factory=dict, metadata=OMIT_DEFAULT)
    """Other hosts that are being reached, each with how far it is."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole session at one moment: what the board shows."""

    ranks: tuple[RankState, ...] = ()
    backend: str = ""
    init_method: str = ""
    """Where the ranks meet: ``tcp://127.0.0.1:41234``."""
    generation: int = 0
    """How many times the process group was built."""
    notes: tuple[str, ...] = ()
    """Decisions made for the user: which device instead of which, and why."""
    ended: str = ""
    """Why the session is over; empty while it lives."""
    loading: Loading | None = None
    """No rank can start before that is over; None when it is."""
    taken_ns: int = 0
    external: bool = field(default=False, metadata=OMIT_DEFAULT)
    """A job that no notebook started: which stages of setup its ranks have passed is not known."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def ready(self) -> bool:
        """True when every rank is set up and waits for a cell."""
        return bool(self.ranks) and all(r.status is Status.READY for r in self.ranks)

    @property
    def groupless(self) -> Ranks:
        """The idle ranks whose code destroyed their process group."""
        return tuple(r.rank for r in self.ranks if r.no_group and r.status is Status.READY)

    def with_status(self, *statuses: Status) -> Ranks:
        """The ranks that are in one of `statuses`."""
        return tuple(r.rank for r in self.ranks if r.status in statuses)


@dataclass(frozen=True, slots=True)
class OutputItem:
    """A piece of a rank's output as it is shown: a run of text, a display, a result, a traceback.

    `text` may hold ANSI colours; carriage returns are already applied.
    """

    what: OutputKind
    text: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    display_id: str = ""


@dataclass(frozen=True, slots=True)
class OutputGroup:
    """Output that is the same on `ranks`: shown once, named by them."""

    ranks: Ranks
    items: tuple[OutputItem, ...]


@dataclass(frozen=True, slots=True)
class Moment:
    """One thing that changed the session's state. Times are the session's monotonic clock.

    Either `event`, or `state`: a state that the session itself set, without an event. Repeated
    identical heartbeats are kept once: the last one arrived at `until_ns` (0: only one).
    """

    at_ns: int
    event: AnyEvent | None = field(default=None, metadata=OMIT_DEFAULT)
    state: Snapshot | None = field(default=None, metadata=OMIT_DEFAULT)
    until_ns: int = field(default=0, metadata=OMIT_DEFAULT)


def exit_text(exit_code: int) -> str:
    """How a process ended: ``killed by SIGKILL``, ``exited with code 3``."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"
