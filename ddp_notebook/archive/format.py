"""A run that is kept in a file: what happened, what the ranks issued, what was known of them."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddp_notebook.model import codec
from ddp_notebook.model.case import Case
from ddp_notebook.model.codec import DecodeError
from ddp_notebook.model.collectives import Collective, Collectives, Place
from ddp_notebook.model.diagnosis import Diagnosis
from ddp_notebook.model.events import EVENT_KINDS, SESSION, Event, Output
from ddp_notebook.model.ranks import Ranks
from ddp_notebook.model.state import Moment, Snapshot

FORMAT = "ddp_notebook run"
"""What a file of ours says it is."""
VERSION = 1
"""Of the format; a reader takes its own version and those before."""
KEY = "ddp_notebook"
"""Where in the file the run stands. Beside it are ``traceEvents``, for viewers of traces."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """What is not there because no more than so much is kept.

    `events` before the first that is there; pieces of `outputs` before the first, 0 when no
    output was asked for; per rank as many `collectives` before its first.
    """

    events: int = 0
    outputs: int = 0
    collectives: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SavedRun:
    """All that a file holds. `snapshot` is the end, `start` the state before the first moment.

    `case` is what was known of the ranks at the end, with what they issued in their last run;
    None when nobody was left to ask. `diagnosis` is what the rules of that day made of it.
    `wall_ns` (since 1970) and `snapshot.taken_ns` (monotonic) are the same instant, the one at
    which it was saved: they tie the two clocks together.
    """

    snapshot: Snapshot
    start: Snapshot
    wall_ns: int
    moments: tuple[Moment, ...] = ()
    outputs: tuple[Output, ...] = ()
    case: Case | None = None
    diagnosis: Diagnosis | None = None
    script: str = ""
    """The file's name, when the last run was a script."""
    run: int = 0
    """The number of the last cell or script, as its events have it; 0 for none."""
    versions: Mapping[str, str] = field(default_factory=dict)
    dropped: Dropped = Dropped()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.snapshot.world_size

    @property
    def collectives(self) -> Collectives:
        """What the ranks issued in their last run."""
        return self.case.collectives if self.case is not None else Collectives()

    @property
    def began_ns(self) -> int:
        """When the first thing happened that is in here; the session's monotonic clock."""
        times = [moment.at_ns for moment in self.moments[:1]]
        times += [output.heard_ns for output in self.outputs[:1]]
        for issued in self.collectives.of.values():
            times += [collective.issued_ns for collective in issued[:1]]
        return min([*times, self.snapshot.taken_ns])

    @property
    def duration_s(self) -> float:
        """Seconds from the first thing to the end."""
        return (self.snapshot.taken_ns - self.began_ns) / 1e9


# -- as JSON -------------------------------------------------------------------------------


def saved_to_json(saved: SavedRun) -> dict[str, Any]:
    """A run as a JSON object, with its format and version first."""
    plain = {
        each.name: codec.to_json(getattr(saved, each.name))
        for each in dataclasses.fields(saved)
        if each.name not in ("moments", "outputs", "case", "diagnosis")
    }
    return {
        "format": FORMAT,
        "version": VERSION,
        **plain,
        "moments": [_moment_to_json(moment) for moment in saved.moments],
        "outputs": [_event_to_json(output) for output in saved.outputs],
        "case": _case_to_json(saved.case) if saved.case is not None else None,
        "diagnosis": codec.to_json(saved.diagnosis),
    }


def saved_from_json(wire: Any) -> SavedRun:
    """The run that `saved_to_json` wrote. Raises DecodeError for anything else.

    The caller has looked at the format and the version.
    """
    if not isinstance(wire, dict):
        raise DecodeError("is no object", KEY)
    rest = dict(wire)
    moments = _each("moments", rest.pop("moments", []), _moment_from_json)
    outputs = _each("outputs", rest.pop("outputs", []), _output_from_json)
    case = rest.pop("case", None)
    try:
        case = _case_from_json(case) if case is not None else None
    except DecodeError as error:
        raise error.inside("case") from None
    plain = codec.from_json(SavedRun, rest)
    saved = dataclasses.replace(plain, moments=moments, outputs=outputs, case=case)
    _check(saved)
    return saved


def _each(name: str, wire: Any, read_one: Callable[[Any], Any]) -> tuple[Any, ...]:
    if not isinstance(wire, list):
        raise DecodeError("must be a list", name)
    found = []
    for number, each in enumerate(wire):
        try:
            found.append(read_one(each))
        except DecodeError as error:
            raise error.inside(f"{name}[{number}]") from None
    return tuple(found)


def _event_to_json(event: Event) -> dict[str, Any]:
    return {"kind": event.kind, **codec.to_json(event)}


def _event_from_json(wire: Any) -> Event:
    kind = wire.get("kind") if isinstance(wire, dict) else None
    cls = EVENT_KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise DecodeError("is no event")
    return codec.from_json(cls, wire)


def _output_from_json(wire: Any) -> Event:
    event = _event_from_json(wire)
    if not isinstance(event, Output):
        raise DecodeError("is no output")
    return event


def _moment_to_json(moment: Moment) -> dict[str, Any]:
    wire: dict[str, Any] = {"at_ns": moment.at_ns}
    if moment.until_ns:
        wire["until_ns"] = moment.until_ns
    if moment.event is not None:
        wire["event"] = _event_to_json(moment.event)
    if moment.state is not None:
        wire["state"] = codec.to_json(moment.state)
    return wire


def _moment_from_json(wire: Any) -> Moment:
    if not isinstance(wire, dict):
        raise DecodeError("must be an object")
    rest = {name: value for name, value in wire.items() if name != "event"}
    moment = codec.from_json(Moment, rest)
    if "event" not in wire:
        return moment
    try:
        return dataclasses.replace(moment, event=_event_from_json(wire["event"]))
    except DecodeError as error:
        raise error.inside("event") from None


# -- collectives as a table: thousands of records with few distinct places ---------------------

_COLUMNS = tuple(each.name for each in dataclasses.fields(Collective))
_PATH = _COLUMNS.index("path")
_ROW = operator.attrgetter(*_COLUMNS)


def _case_to_json(case: Case) -> dict[str, Any]:
    bare = dataclasses.replace(case, collectives=Collectives())
    collectives = case.collectives
    paths: dict[tuple[Place, ...], int] = {}
    rows = []
    for issued in collectives.of.values():
        for each in issued:
            row = list(_ROW(each))
            row[_PATH] = paths.setdefault(each.path, len(paths))
            rows.append([codec.to_json(value) for value in row])
    table = {
        "ranks": list(collectives.of),
        "columns": list(_COLUMNS),
        "rows": rows,
        "paths": codec.to_json(tuple(paths)),
        "groups": codec.to_json(collectives.groups),
        "first": codec.to_json(collectives.first),
    }
    return {**codec.to_json(bare), "collectives": table}


@dataclass(frozen=True, slots=True)
class _Table:
    """The collectives of all ranks as they are written."""

    ranks: Ranks
    columns: tuple[str, ...]
    rows: tuple[Any, ...]
    paths: tuple[tuple[Place, ...], ...]
    groups: Mapping[str, Ranks]
    first: Mapping[int, int]


def _case_from_json(wire: Any) -> Case:
    if not isinstance(wire, dict):
        raise DecodeError("must be an object")
    rest = {name: value for name, value in wire.items() if name != "collectives"}
    case = codec.from_json(Case, rest)
    try:
        table = codec.from_json(_Table, wire.get("collectives"))
        return dataclasses.replace(case, collectives=_from_table(table))
    except DecodeError as error:
        raise error.inside("collectives") from None


def _from_table(table: _Table) -> Collectives:
    issued: dict[int, list[Collective]] = {rank: [] for rank in table.ranks}
    for number, row in enumerate(table.rows):
        if not isinstance(row, list) or len(row) != len(table.columns):
            raise DecodeError(f"must be a list of {len(table.columns)}", f"rows[{number}]")
        try:
            each = _from_row(table.columns, row, table.paths)
        except DecodeError as error:
            raise error.inside(f"rows[{number}]") from None
        if each.rank not in issued:
            raise DecodeError(f"is of rank {each.rank}, which is not there", f"rows[{number}]")
        issued[each.rank].append(each)
    return Collectives(
        {rank: tuple(each) for rank, each in issued.items()}, table.groups, table.first
    )


def _from_row(
    columns: Sequence[str], row: Sequence[Any], paths: Sequence[tuple[Place, ...]]
) -> Collective:
    wire = dict(zip(columns, row, strict=True))
    path = wire.pop("path", None)
    if not isinstance(path, int) or not 0 <= path < len(paths):
        raise DecodeError("is no number of a path", "path")
    collective = codec.from_json(Collective, wire)
    return dataclasses.replace(collective, path=paths[path])


# -- what types do not say ---------------------------------------------------------------------


def _check(saved: SavedRun) -> None:
    """Ranks are those that there are. Raises DecodeError."""
    everyone = range(saved.world_size)
    states = [("snapshot", saved.snapshot), ("start", saved.start)]
    states += [("moments", m.state) for m in saved.moments if m.state is not None]
    for name, snapshot in states:
        if [state.rank for state in snapshot.ranks] != list(everyone):
            raise DecodeError(
                f"must have ranks 0 to {len(everyone) - 1}, in order", f"{name}.ranks"
            )
    for moment in saved.moments:
        if moment.event is not None and moment.event.rank not in (SESSION, *everyone):
            raise DecodeError(
                f"has an event of rank {moment.event.rank}, which is not there", "moments"
            )
    if saved.case is not None:
        _check_case(saved.case, everyone)


def _check_case(case: Case, everyone: range) -> None:
    ranks = [evidence.rank for evidence in case.ranks]
    if len(set(ranks)) != len(ranks) or not set(ranks) <= set(everyone):
        raise DecodeError("must have ranks that are there, each once", "case.ranks")
    collectives = case.collectives
    members = {rank for group in collectives.groups.values() for rank in group}
    if not members | set(collectives.of) | set(collectives.first) <= set(everyone):
        raise DecodeError("are of ranks that are not there", "case.collectives")
