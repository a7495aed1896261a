"""Events: facts, each sent once by the rank that it is about; and messages of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from ddp_notebook.model import codec
from ddp_notebook.model.codec import OMIT_DEFAULT, DecodeError
from ddp_notebook.model.collectives import Place
from ddp_notebook.model.stages import Stage

SESSION = -1
"""The `rank` of an event that the session or its store process emitted."""


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
    """A fact, sent once by the rank that it is about.

    `seq` counts a rank's events without gaps, so that a gap is known to be a loss.
    `time_ns` is the sender's wall clock; `heard_ns` is the session's monotonic clock when
    the event arrived, 0 until then.
    """

    kind: ClassVar[str] = ""
    """Its name in JSON; each subclass has its own."""
    kinds: ClassVar[dict[str, type[Event]]] = {}
    """The subclasses by `kind`: what the codec reads. A new event is a new subclass, no more."""
    rank: int
    seq: int = 0
    time_ns: int = 0
    heard_ns: int = 0

    def __init_subclass__(cls) -> None:
        # Called twice for each: a dataclass with slots is created again, and the second class
        # counts.
        Event.kinds[cls.kind] = cls


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpawned(Event):
    """The rank's process was started."""

    kind: ClassVar[str] = "rank_spawned"
    pid: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStarted(Event):
    """The rank entered a stage. `waiting_for` says what it may have to wait for."""

    kind: ClassVar[str] = "stage_started"
    stage: Stage
    waiting_for: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFinished(Event):
    """The rank passed a stage. `detail` is what it found, as readable text."""

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
    """The rank is paused before `stage` until it is stepped."""

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

    `withheld_bytes` of output were not sent to the notebook. `trained`: an optimizer made steps, or
    a collective was not waited for, so that post-run checks apply.
    """

    kind: ClassVar[str] = "cell_finished"
    cell: int
    outcome: str
    ename: str = ""
    evalue: str = ""
    line: int = 0
    path: tuple[Place, ...] = field(default=(), metadata=OMIT_DEFAULT)
    """The user's lines that the error passed through, the outermost first; or, where a script ended
    well, its sys.exit()."""
    withheld_bytes: int = 0
    trained: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LineStopped(Event):
    """A thread of the rank is paused before a line of `cell` until it is resumed.

    `stop` counts a rank's stops. `file` is as in a `Frame`: ``cell 3`` or a path. `why` is empty
    after a step. `source` are the lines from `first` on, around it.
    """

    kind: ClassVar[str] = "line_stopped"
    cell: int
    stop: int
    file: str
    line: int
    function: str
    why: str = ""
    thread: str = ""
    """The thread's name where it is not the main one."""
    first: int = 0
    source: tuple[str, ...] = field(default=(), metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineLeft(Event):
    """A thread that was paused at a line was interrupted and is no longer paused."""

    kind: ClassVar[str] = "line_left"
    cell: int
    stop: int


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
    """The rank's process ended. `exit_code` is negative for a signal, as in subprocess.

    `cell` is the one that a script's process was started for; -1 for a rank's own process.
    """

    kind: ClassVar[str] = "rank_exited"
    pid: int
    exit_code: int
    last_words: str = ""
    peak_bytes: int = 0
    oom_kills: int = -1
    cell: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsLost(Event):
    """`count` events of this rank never arrived."""

    kind: ClassVar[str] = "events_lost"
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limited(Event):
    """A feature of ours is disabled on the rank: which one, and why."""

    kind: ClassVar[str] = "limited"
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOpened(Event):
    """The session's store listens at `host`:`port`."""

    kind: ClassVar[str] = "store_opened"
    host: str
    port: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFailed(Event):
    """The session's store could not be opened: why, what to type, and the finding's category."""

    kind: ClassVar[str] = "store_failed"
    cause: str
    remedy: str
    pid: int = 0
    category: str = ""


def encode_events(events: Iterable[Event]) -> bytes:
    """A message with `events`; display data that is not JSON is written as its repr.

    An unpaired surrogate, which cannot be encoded, becomes "?": all text of a rank passes here.
    """
    wires = [codec.encode(event) for event in events]
    try:
        return _as_json(wires)
    except (TypeError, ValueError, RecursionError):  # keys that are no text; it contains itself
        return _as_json([_sendable(wire) for wire in wires])


def _as_json(wire: Any) -> bytes:
    return json.dumps(wire, default=_shown, ensure_ascii=False).encode("utf-8", "replace")


def _shown(value: object) -> str:
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001  # the user's own __repr__
        return f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"


def _sendable(wire: dict[str, Any]) -> dict[str, Any]:
    """The event with display data that can be sent, or with the reason why not."""
    try:
        _as_json(wire)
    except (TypeError, ValueError, RecursionError) as error:
        if wire["kind"] != Output.kind:
            raise
        why = f"[what was displayed cannot be sent as JSON: {type(error).__name__}: {error}]\n"
        note = {"what": OutputKind.STDERR.value, "text": why, "data": {}, "metadata": {}}
        return {**wire, **note}
    return wire


def decode_events(message: bytes, heard_ns: int) -> list[Event]:
    """The events that `encode_events` wrote, heard at `heard_ns`; those that can be read.

    Raises DecodeError where there is no list of them at all.
    """
    try:
        wires = codec.loads(message)
    except ValueError as error:
        raise DecodeError(f"is not JSON: {error}") from None
    if not isinstance(wires, list):
        raise DecodeError("must be a list")
    events = []
    for wire in wires:
        with contextlib.suppress(DecodeError):  # an event of another version: skip it
            timed = {**wire, "heard_ns": heard_ns} if isinstance(wire, dict) else wire
            events.append(codec.decode(Event, timed))
    return events
