"""The content of a file: events, collectives, and a report of each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ddp_notebook.model import codec
from ddp_notebook.model.case import GROUPED, Case
from ddp_notebook.model.codec import OMIT_DEFAULT, DecodeError
from ddp_notebook.model.collectives import Collectives, CollectiveTable
from ddp_notebook.model.diagnosis import Diagnosis
from ddp_notebook.model.events import SESSION, CellFinished, Output, RankExited
from ddp_notebook.model.fold import LinePause, LineStops
from ddp_notebook.model.ranks import Ranks
from ddp_notebook.model.state import Moment, Snapshot

FORMAT = "ddp_notebook run"
"""Marks a file as ours."""
VERSION = 2
"""The version of the format; a reader takes its own and earlier ones.

Since 2 what belongs together stands in one object of a rank's report.
"""
KEY = "ddp_notebook"
"""Where in the file the run stands. Beside it are ``traceEvents``, for viewers of traces."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """How much was dropped, because only so much is kept.

    `events` before the first that is there; pieces of `outputs` before the first, 0 when no
    output was asked for; per rank as many `collectives` before its first.
    """

    events: int = 0
    outputs: int = 0
    collectives: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Observed:
    """How a job that no notebook started was looked at.

    `name` is the job's, as it was asked for, `about` a line on how it was then; `basis` says what
    the diagnosis stands on, `unread` what was left out. `ranks` are those of which processes were
    found on that host, and `prepared` says whether these could be asked.
    """

    name: str
    about: str = ""
    basis: str = ""
    unread: tuple[str, ...] = ()
    ranks: Ranks = ()
    prepared: bool = False


@dataclass(frozen=True, slots=True)
class SavedRun:
    """All that a file holds. `snapshot` is the end, `start` the state before the first moment.

    `case` is what was known of the ranks at the end, with what they issued in their last run;
    None if no rank was left to ask. `diagnosis` is the result of the rules when it was saved.
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
    stands: bool = False
    """`diagnosis` stands on more than `case` has: on a look at a job from outside, or on post-run
    checks."""
    observed: Observed | None = field(default=None, metadata=OMIT_DEFAULT)
    """How the job was looked at, if no notebook started it."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.snapshot.world_size

    @property
    def collectives(self) -> Collectives:
        """The collectives of the last run."""
        return self.case.collectives if self.case is not None else Collectives()

    @property
    def began_ns(self) -> int:
        """When the first thing happened that is in here; the session's monotonic clock."""
        times = [moment.at_ns for moment in self.moments[:1]]
        times += [output.heard_ns for output in self.outputs[:1]]
        for issued in self.collectives.of.values():
            times += [collective.issued_ns - collective.call.held_ns for collective in issued[:1]]
        return min([*times, self.snapshot.taken_ns])

    @property
    def left_ns(self) -> dict[int, int]:
        """When each rank left the last run, by its end or by that of its process."""
        return {
            moment.event.rank: moment.at_ns
            for moment in self.moments
            if isinstance(moment.event, RankExited)
            or (isinstance(moment.event, CellFinished) and moment.event.cell == self.run)
        }

    @property
    def pauses(self) -> tuple[LinePause, ...]:
        """From when until when ranks were paused at lines in the last run."""
        stops = LineStops()
        for moment in self.moments:
            event = moment.event
            if event is not None and getattr(event, "cell", self.run) == self.run:
                stops.take(event, moment.at_ns)
        return stops.pauses

    @property
    def duration_s(self) -> float:
        """Seconds from the first thing to the end."""
        return (self.snapshot.taken_ns - self.began_ns) / 1e9


# -- as JSON -------------------------------------------------------------------------------


def encode_run(saved: SavedRun) -> dict[str, Any]:
    """Return a run as a JSON object, with its format and version first."""
    # Collectives are written as a table of columns: one object for each would repeat all names.
    plain = saved if saved.case is None else _with(saved, Collectives())
    wire = {"format": FORMAT, "version": VERSION, **codec.encode(plain)}
    if saved.case is not None:
        wire["case"]["collectives"] = codec.encode(saved.case.collectives.table())
    return wire


def decode_run(wire: Any) -> SavedRun:
    """Return the run that `encode_run` wrote. Raises DecodeError for anything else.

    The caller has looked at the format and the version.
    """
    case, table = wire.get("case") if isinstance(wire, dict) else None, None
    if isinstance(case, dict):
        table = case.get("collectives")
        if wire.get("version") == 1:
            case = {**case, "ranks": [*map(_grouped, case.get("ranks") or ())]}
        wire = {**wire, "case": {name: case[name] for name in case if name != "collectives"}}
    saved = codec.decode(SavedRun, wire)
    if saved.case is not None and table is not None:
        saved = _with(saved, codec.decode(CollectiveTable, table).collectives())
    _check(saved)
    return saved


def _grouped(report: Any) -> Any:
    """Return the report of a rank in a file of version 1, its fields where they are now."""
    if not isinstance(report, dict):
        return report  # the codec says what is wrong with it
    moved = {name: value for name, value in report.items() if name not in GROUPED}
    for name, (group, field_) in GROUPED.items():
        if name in report:
            moved.setdefault(group, {})[field_] = report[name]
    return moved


def _with(saved: SavedRun, collectives: Collectives) -> SavedRun:
    assert saved.case is not None
    return replace(saved, case=replace(saved.case, collectives=collectives))


# -- what types do not say ---------------------------------------------------------------------


def _check(saved: SavedRun) -> None:
    """Check that all ranks in it exist, which types do not say. Raises DecodeError."""
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
                f"has an event of rank {moment.event.rank}, which is missing", "moments"
            )
    if saved.case is not None:
        _check_case(saved.case, everyone)


def _check_case(case: Case, everyone: range) -> None:
    ranks = [report.rank for report in case.ranks]
    if len(set(ranks)) != len(ranks) or not set(ranks) <= set(everyone):
        raise DecodeError("must have existing ranks, each once", "case.ranks")
    collectives = case.collectives
    members = {rank for group in collectives.groups.values() for rank in group}
    if not members | set(collectives.of) | set(collectives.first) <= set(everyone):
        raise DecodeError("are of ranks that are missing", "case.collectives")
