"""Events: facts, each sent once by the rank that it is about; and messages of them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import msgspec

from ddp_notebook.model import codec
from ddp_notebook.model.codec import DecodeError
from ddp_notebook.model.collectives import Place
from ddp_notebook.model.stages import Stage

SESSION = -1
"""The `rank` of an event that the session or its store process emitted."""


class OutputKind(StrEnum):
    """The kinds of `Output`."""

    STDOUT = "stdout"
    STDERR = "stderr"
    DISPLAY = "display"
    RESULT = "result"
    ERROR = "error"
    CLEAR = "clear"


def _tag(name: str) -> str:
    """Return the name of an event's class as files have it: ``rank_spawned``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=_tag):
    """A fact, sent once by the rank that it is about.

    `seq` counts a rank's events without gaps, so that a gap is known to be a loss.
    `time_ns` is the sender's wall clock; `heard_ns` is the session's monotonic clock when
    the event arrived, 0 until then.
    """

    rank: int
    seq: int = 0
    time_ns: int = 0
    heard_ns: int = 0


class RankSpawned(Event, frozen=True, kw_only=True):
    """The rank's process was started."""

    pid: int
    device: str


class StageStarted(Event, frozen=True, kw_only=True):
    """The rank entered a stage. `waiting_for` says what it may have to wait for."""

    stage: Stage
    waiting_for: str = ""


class StageFinished(Event, frozen=True, kw_only=True):
    """The rank passed a stage. `detail` is what it found, as readable text."""

    stage: Stage
    detail: str = ""
    pid: int = 0
    host: str = ""
    device: str = ""


class StageFailed(Event, frozen=True, kw_only=True):
    """The rank failed in a stage: why, and what to type. `category` where the rank is sure."""

    stage: Stage
    cause: str
    remedy: str
    category: str = ""


class StagePaused(Event, frozen=True, kw_only=True):
    """The rank is paused before `stage` until it is stepped."""

    stage: Stage


class CellStarted(Event, frozen=True, kw_only=True):
    """The rank began to run a cell.

    `cell` is counted by the session from 1, 0 for its benchmark; `number` is the prompt's.
    """

    cell: int
    number: int = 0


class CellFinished(Event, frozen=True, kw_only=True):
    """The rank is done with a cell. `outcome` is ok, error or interrupted.

    `withheld_bytes` of output were not sent to the notebook. `trained`: a model was trained or
    used, or a collective was not waited for, so that post-run checks apply. `no_group`: after a
    cell the rank has no process group any more; its code destroyed it.
    """

    cell: int
    outcome: str
    ename: str = ""
    evalue: str = ""
    line: int = 0
    path: tuple[Place, ...] = ()
    """The user's lines that the error passed through, the outermost first; or, where a script ended
    well, its sys.exit()."""
    withheld_bytes: int = 0
    trained: bool = False
    no_group: bool = False


class LineStopped(Event, frozen=True, kw_only=True):
    """A thread of the rank is paused before a line of `cell` until it is resumed.

    `stop` counts a rank's stops. `file` is as in a `Frame`: ``cell 3`` or a path. `why` is empty
    after a step. `source` are the lines from `first` on, around it.
    """

    cell: int
    stop: int
    file: str
    line: int
    function: str
    why: str = ""
    thread: str = ""
    """The thread's name where it is not the main one."""
    first: int = 0
    source: tuple[str, ...] = ()


class LineLeft(Event, frozen=True, kw_only=True):
    """A thread that was paused at a line was interrupted and is no longer paused."""

    cell: int
    stop: int


class Output(Event, frozen=True, kw_only=True):
    """Something the rank's code wrote or displayed while running `cell`.

    `text` for streams and tracebacks; `data` (MIME type to value) and `metadata` for rich
    displays. A display with `update` replaces an earlier one with the same `display_id`.
    """

    cell: int
    what: OutputKind
    text: str = ""
    data: Mapping[str, Any] = msgspec.field(default_factory=dict)
    metadata: Mapping[str, Any] = msgspec.field(default_factory=dict)
    display_id: str = ""
    update: bool = False


class Pulse(Event, frozen=True, kw_only=True):
    """A sign of life. `doing` is where the main thread is: ``all_reduce (cell 4, line 7)``."""

    doing: str = ""
    cell: int = 0
    withheld_bytes: int = 0


class Progress(Event, frozen=True, kw_only=True):
    """`done` of `total` steps of a long task of ours; `value` is one finished result as JSON."""

    task: str
    done: int
    total: int
    value: Mapping[str, Any] = msgspec.field(default_factory=dict)


class RankExited(Event, frozen=True, kw_only=True):
    """The rank's process ended. `exit_code` is negative for a signal, as in subprocess.

    `cell` is the one that a script's process was started for; -1 for a rank's own process.
    """

    pid: int
    exit_code: int
    last_words: str = ""
    peak_bytes: int = 0
    oom_kills: int = -1
    cell: int = -1


class EventsLost(Event, frozen=True, kw_only=True):
    """`count` events of this rank never arrived."""

    count: int


class Limited(Event, frozen=True, kw_only=True):
    """A feature of ours is disabled on the rank: which one, and why."""

    text: str


class StoreOpened(Event, frozen=True, kw_only=True):
    """The session's store listens at `host`:`port`."""

    host: str
    port: int
    pid: int


class StoreFailed(Event, frozen=True, kw_only=True):
    """The session's store could not be opened: why, what to type, and the finding's category."""

    cause: str
    remedy: str
    pid: int = 0
    category: str = ""


if TYPE_CHECKING:
    AnyEvent: TypeAlias = Event
else:
    # msgspec tells the classes of a union apart by their tags, but not those below a base class.
    AnyEvent = Union[tuple(Event.__subclasses__())]  # noqa: UP007  # not one can be written `|`


def encode_events(events: Iterable[Event]) -> bytes:
    """Return a message with `events`; display data that is not JSON is written as its repr.

    An unpaired surrogate, which cannot be encoded, becomes "?": all text of a rank passes here.
    """
    wires = [codec.tagged(event) for event in events]
    refused = (TypeError, ValueError, RecursionError)  # keys that are no text; it contains itself
    with contextlib.suppress(*refused):
        return _as_json(wires)
    for wire in wires:
        try:
            _as_json(wire)
        except refused as error:
            if "what" not in wire:  # no `Output`
                raise
            why = f"[what was displayed cannot be sent as JSON: {type(error).__name__}: {error}]\n"
            wire.update(what=OutputKind.STDERR, text=why, data={}, metadata={})
    return _as_json(wires)


def _as_json(wire: Any) -> bytes:
    return json.dumps(wire, default=_shown, ensure_ascii=False).encode("utf-8", "replace")


def _shown(value: object) -> Any:
    if isinstance(value, Place):
        return codec.encode(value)
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001  # the user's own __repr__
        return f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"


def decode_events(message: bytes, heard_ns: int) -> list[Event]:
    """Return the events in what `encode_events` wrote, received at `heard_ns`; those it can read.

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
            events.append(codec.decode(AnyEvent, timed))
    return events
