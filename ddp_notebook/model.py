"""The words and values everything else is made of.

Plain frozen values and the functions that need nothing but them: rank sets, stages, the
events a rank emits, the state those events add up to, and what a benchmark measured.
Standard library only; everything here can be written as JSON and read back.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, TypeAlias

Ranks: TypeAlias = tuple[int, ...]
"""A rank set: sorted, without repeats. Written ``0``, ``0,2``, ``1-3`` or ``all``."""

SESSION = -1
"""The `rank` of an event that no rank emitted: the session or its store keeper did."""

_RANK_PART = re.compile(r"(\d+)(?:-(\d+))?")


def parse_ranks(text: str, world_size: int) -> Ranks:
    """The rank set that `text` writes (``0``, ``0,2``, ``1-3``, ``all``).

    Raises ValueError, with a message for the user, when the text is not a rank set or
    names a rank that `world_size` ranks do not have.
    """
    if text.strip().lower() == "all":
        return tuple(range(world_size))
    ranks: set[int] = set()
    for part in (p.strip() for p in text.split(",")):
        match = _RANK_PART.fullmatch(part)
        if match is None:
            raise ValueError(f"{text!r} is not a set of ranks: write 0, 0,2, 1-3 or all.")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{part!r} runs backwards: write {last}-{first}.")
        if last >= world_size:
            absent = first if first >= world_size else last
            last_rank = f"ranks are 0 to {world_size - 1}" if world_size > 1 else "the rank is 0"
            raise ValueError(
                f"Rank {absent} does not exist: world size is {world_size}, so {last_rank}."
            )
        ranks.update(range(first, last + 1))
    return tuple(sorted(ranks))


def format_ranks(ranks: Iterable[int]) -> str:
    """A rank set as it is written: ``0,2-4`` (the inverse of `parse_ranks`)."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def name_ranks(ranks: Iterable[int]) -> str:
    """A rank set in a sentence: ``rank 1``, ``ranks 0,2-3``."""
    members = tuple(ranks)
    return f"{'rank' if len(members) == 1 else 'ranks'} {format_ranks(members)}"


class Stage(StrEnum):
    """One step of bringing torch.distributed up, in order. The value is what a user types."""

    LAUNCHED = "launched"
    ENVIRONMENT = "environment"
    STORE = "store"
    RENDEZVOUS = "rendezvous"
    PROCESS_GROUP = "process-group"
    VERIFIED = "verified"

    @property
    def label(self) -> str:
        """What is true of a rank that has passed this stage."""
        return _STAGE_LABELS[self]

    @property
    def number(self) -> int:
        """1 for the first stage."""
        return list(Stage).index(self) + 1


_STAGE_LABELS = {
    Stage.LAUNCHED: "launched",
    Stage.ENVIRONMENT: "environment checked",
    Stage.STORE: "store reachable",
    Stage.RENDEZVOUS: "joined rendezvous",
    Stage.PROCESS_GROUP: "process group",
    Stage.VERIFIED: "verified",
}


class Status(StrEnum):
    """What a rank is at, in one word."""

    STARTING = "starting"
    """Its process is asked for; the rank has not spoken yet."""
    SETTING_UP = "setting up"
    """It is in a stage of set-up."""
    READY = "ready"
    """Set up and waiting for a cell."""
    RUNNING = "running"
    """It runs a cell."""
    FAILED = "failed"
    """Its set-up failed; its variables live."""
    DEAD = "dead"
    """Its process is gone."""


# --------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A fact, said once by the rank it is about.

    `seq` counts a rank's events without gaps, so that a gap is known to be a loss.
    `time_ns` is the sender's wall clock; `heard_ns` is the session's monotonic clock when
    the event arrived, 0 until then.
    """

    kind: ClassVar[str] = ""
    rank: int
    seq: int = 0
    time_ns: int = 0
    heard_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpawned(Event):
    """The rank's process was started."""

    kind: ClassVar[str] = "rank_spawned"
    pid: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStarted(Event):
    """The rank entered a stage. `waiting_for` says on what it may have to wait."""

    kind: ClassVar[str] = "stage_started"
    stage: Stage
    waiting_for: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFinished(Event):
    """The rank passed a stage. `detail` is what it found, for a person to read."""

    kind: ClassVar[str] = "stage_finished"
    stage: Stage
    detail: str = ""
    pid: int = 0
    host: str = ""
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFailed(Event):
    """The rank failed in a stage: why, and what to type."""

    kind: ClassVar[str] = "stage_failed"
    stage: Stage
    cause: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CellStarted(Event):
    """The rank began to run cell number `cell` (counted by the session from 1)."""

    kind: ClassVar[str] = "cell_started"
    cell: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFinished(Event):
    """The rank is done with a cell. `outcome` is ok, error or interrupted.

    `withheld_bytes` of output were written beyond what was sent to the notebook.
    """

    kind: ClassVar[str] = "cell_finished"
    cell: int
    outcome: str
    ename: str = ""
    evalue: str = ""
    line: int = 0
    withheld_bytes: int = 0


class OutputKind(StrEnum):
    """What an `Output` is."""

    STDOUT = "stdout"
    STDERR = "stderr"
    DISPLAY = "display"
    RESULT = "result"
    ERROR = "error"
    CLEAR = "clear"


@dataclass(frozen=True, slots=True, kw_only=True)
class Output(Event):
    """Something the rank's code wrote or displayed while running `cell`.

    `text` for streams and tracebacks; `data` (MIME type to value) and `metadata` for rich
    displays. A display with `update` replaces an earlier one with the same `display_id`.
    """

    kind: ClassVar[str] = "output"
    cell: int
    what: OutputKind
    text: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    display_id: str = ""
    update: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse(Event):
    """A sign of life. `doing` is where the main thread is: ``all_reduce (cell 4, line 7)``."""

    kind: ClassVar[str] = "pulse"
    doing: str = ""
    cell: int = 0
    withheld_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Event):
    """`done` of `total` steps of a long task of ours; `value` is one finished result as JSON."""

    kind: ClassVar[str] = "progress"
    task: str
    done: int
    total: int
    value: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExited(Event):
    """The rank's process ended. `exit_code` is negative for a signal, as in subprocess."""

    kind: ClassVar[str] = "rank_exited"
    pid: int
    exit_code: int
    last_words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsLost(Event):
    """`count` events of this rank never arrived."""

    kind: ClassVar[str] = "events_lost"
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOpened(Event):
    """The session's store listens at `host`:`port`."""

    kind: ClassVar[str] = "store_opened"
    host: str
    port: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFailed(Event):
    """The session's store could not be opened: why, and what to type."""

    kind: ClassVar[str] = "store_failed"
    cause: str
    remedy: str


EVENT_KINDS: dict[str, type[Event]] = {
    cls.kind: cls
    for cls in (
        RankSpawned,
        StageStarted,
        StageFinished,
        StageFailed,
        CellStarted,
        CellFinished,
        Output,
        Pulse,
        Progress,
        RankExited,
        EventsLost,
        StoreOpened,
        StoreFailed,
    )
}


def encode(event: Event) -> dict[str, Any]:
    """An event as a JSON object."""
    fields = {
        f.name: getattr(event, f.name) for f in dataclasses.fields(event) if f.name != "heard_ns"
    }
    return {"kind": event.kind, **fields}


def decode(wire: Mapping[str, Any]) -> Event:
    """The event that `encode` wrote. Raises ValueError for anything else."""
    fields = dict(wire)
    cls = EVENT_KINDS.get(fields.pop("kind", ""))
    if cls is None:
        raise ValueError(f"not an event: {wire!r:.200}")
    if "stage" in fields:
        fields["stage"] = Stage(fields["stage"])
    if "what" in fields:
        fields["what"] = OutputKind(fields["what"])
    try:
        return cls(**fields)
    except TypeError as error:
        raise ValueError(f"not a {cls.kind} event: {error}") from None


# --------------------------------------------------------------------------- state


@dataclass(frozen=True, slots=True)
class RankState:
    """What is known of one rank. `heard_ns` (session's monotonic clock) is when it last spoke."""

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
    doing: str = ""
    cause: str = ""
    remedy: str = ""
    exit_code: int | None = None
    last_words: str = ""
    lost_events: int = 0
    heard_ns: int = 0


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
    """What was decided for the user, said: which device instead of which, and why."""
    ended: str = ""
    """Why the session is over; empty while it lives."""
    taken_ns: int = 0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def ready(self) -> bool:
        """True when every rank is set up and waits for a cell."""
        return bool(self.ranks) and all(r.status is Status.READY for r in self.ranks)

    def with_status(self, *statuses: Status) -> Ranks:
        """The ranks that are in one of `statuses`."""
        return tuple(r.rank for r in self.ranks if r.status in statuses)


# --------------------------------------------------------------------------- benchmark


@dataclass(frozen=True, slots=True)
class BenchPoint:
    """One tensor size. Times are of the slowest rank in each iteration, in microseconds.

    `latency_us` is the median over iterations. `algbw_gb_per_s` is size over that time,
    `busbw_gb_per_s` the same times 2(n-1)/n: nccl-tests' definitions, GB = 1e9 bytes.
    `wrong` counts results that were not what all_reduce must give.
    """

    size_bytes: int
    iterations: int
    latency_us: float
    mean_us: float
    p10_us: float
    p90_us: float
    algbw_gb_per_s: float
    busbw_gb_per_s: float
    wrong: int


@dataclass(frozen=True, slots=True)
class BenchResult:
    """What `%ddp_bench` measured, smallest size first."""

    op: str
    backend: str
    device: str
    dtype: str
    world_size: int
    points: tuple[BenchPoint, ...]
    notes: tuple[str, ...] = ()


def format_bytes(count: int) -> str:
    """A number of bytes for a person: ``4 B``, ``64 KiB``, ``1.5 MiB``. 1 KiB is 1024 bytes."""
    for unit, worth in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if round(1024 * count / worth, 1) >= 1024:  # the next unit down would say 1024 or more
            return f"{count / worth:.1f} {unit}".replace(".0 ", " ")
    return f"{count} B"


# --------------------------------------------------------------------------- what views draw


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
    """What they do, wait for, or died of."""
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
