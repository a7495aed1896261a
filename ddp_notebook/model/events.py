"""What ranks say: events, and their form on the wire."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from ddp_notebook.model.stages import Stage

SESSION = -1
"""The `rank` of an event that no rank emitted: the session or its store process did."""


class OutputKind(StrEnum):
    """What an `Output` is."""

    STDOUT = "stdout"
    STDERR = "stderr"
    DISPLAY = "display"
    RESULT = "result"
    ERROR = "error"
    CLEAR = "clear"


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
    """The rank failed in a stage: why, and what to type. `category` where the rank is sure."""

    kind: ClassVar[str] = "stage_failed"
    stage: Stage
    cause: str
    remedy: str
    category: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePaused(Event):
    """The rank stands before `stage` and goes on when it is stepped."""

    kind: ClassVar[str] = "stage_paused"
    stage: Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class CellStarted(Event):
    """The rank began to run a cell.

    `cell` is counted by the session from 1, 0 for its benchmark; `number` is the prompt's.
    """

    kind: ClassVar[str] = "cell_started"
    cell: int
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFinished(Event):
    """The rank is done with a cell. `outcome` is ok, error or interrupted.

    `withheld_bytes` of output were written beyond what was sent to the notebook. `trained`: an
    optimizer has made steps with a DistributedDataParallel object; there is more to ask for.
    """

    kind: ClassVar[str] = "cell_finished"
    cell: int
    outcome: str
    ename: str = ""
    evalue: str = ""
    line: int = 0
    withheld_bytes: int = 0
    trained: bool = False


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
    pid: int = 0


EVENT_KINDS: dict[str, type[Event]] = {
    cls.kind: cls
    for cls in (
        RankSpawned,
        StageStarted,
        StageFinished,
        StageFailed,
        StagePaused,
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
