"""The ranks' collectives: one record each, written by every rank's observer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import Any

from ddp_notebook.model import codec
from ddp_notebook.model.codec import DecodeError
from ddp_notebook.model.ranks import Ranks

DEFAULT_GROUP = "default"
"""The name of the default process group in records, however torch numbers it."""
PLACING = ("distribute_module", "distribute_tensor", "parallelize_module")
"""Functions of `torch.distributed.tensor` that communicate once for each tensor, as a plan says."""


class Phase(StrEnum):
    """The phase of a collective on one rank."""

    HELD = "held"
    """It waits before it is issued until it is stepped on."""
    ISSUED = "issued"
    DONE = "done"
    FAILED = "failed"
    """torch raised an error, when it was issued or later."""
    REFUSED = "refused"
    """Never issued: another rank's collective in this slot does not match."""


class Part(StrEnum):
    """Which part of DistributedDataParallel issued a collective."""

    CONSTRUCTOR = "constructor"
    FORWARD = "forward"
    """Buffers, before a forward pass."""
    BACKWARD = "backward"
    """A bucket of gradients."""
    JOIN = "join"


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the user's code: the file as it is shown, ``train.py`` or ``cell 3``."""

    file: str
    line: int
    function: str = ""
    """Empty at the outermost level of a file or cell."""
    text: str = ""
    """The line itself, without indentation."""

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}" + (f", in {self.function}" if self.function else "")


def at_place(place: Place | None) -> str:
    """The place in a sentence: `` at train.py, line 3``; empty where it is not known."""
    return f" at {place}" if place is not None else ""


def in_brackets(place: Place | None) -> str:
    """The place behind a sentence: `` (train.py, line 3)``; empty where it is not known."""
    return f" ({place})" if place is not None else ""


@dataclass(frozen=True, slots=True)
class Splits:
    """A rank's splits of an all_to_all: how much it sends to each member, and expects of it.

    In rows, or in elements where lists of tensors are sent. `announced` is the counts that it sent
    to each member before, in an exchange of a few integers; empty without one.
    """

    group: str
    slot: int
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    announced: tuple[int, ...] = ()
    widths: tuple[int, int] = (1, 1)
    """Elements of a row that is sent, and of one that is expected."""


@dataclass(frozen=True, slots=True)
class CallFacts:
    """How a collective was called on its rank.

    `held_ns` is how long it was paused before it was issued (while it is paused, `issued_ns` is
    when that began). With `freed` it failed because its rank was freed or interrupted.
    The call itself lasts until it is done where it is `waited` for; `thread` tells threads of the
    rank apart, 0 is the main thread. torch gives it up `limit_s` after it was issued; 0: in a day
    or more, or unknown.
    """

    held_ns: int = 0
    freed: bool = False
    waited: bool = False
    thread: int = 0
    limit_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective, send or receive of one rank. Unknown fields have None, "" or ().

    `number` counts everything that the rank issued in this run, from 0; `slot` counts what it
    issued in `group`, sends and receives apart, so that equal slots of two ranks meet; one that
    was refused has the slot of what the rank issues next.
    `operation` is torch's own name (all_reduce, broadcast, ...), `api` the function that the
    user called (all_gather_object, backward, ...). `shape` and `dtype` are those of the first
    of `tensors` tensors, with `numel` elements in all. `root` and `peer` are ranks of the
    default group. `called` is what people call the group: a mesh's dimension, or what the user
    called it; empty for nothing. `path` leads from the outermost line of the user's code to the
    innermost.
    `label` holds texts that the innermost line iterates over: the name of a metric.
    Times are CLOCK_MONOTONIC, the same clock for all ranks of a host; `done_ns` is when it was
    seen to be done, 0 for not yet. `backwards` is how many backward passes the rank had begun.
    The `peer` of a recv from any rank is known once it has got a message. `purpose` is what torch
    does with what the rank waits in, where that is known: ``layers.5 (FSDP2, forward)``.
    """

    rank: int
    number: int
    operation: str
    slot: int = 0
    group: str = DEFAULT_GROUP
    api: str = ""
    part: Part | None = None
    shape: tuple[int, ...] = ()
    dtype: str = ""
    numel: int = 0
    tensors: int = 1
    bytes: int = 0
    reduce_op: str = ""
    root: int | None = None
    peer: int | None = None
    tag: int = 0
    path: tuple[Place, ...] = ()
    label: str = ""
    phase: Phase = Phase.ISSUED
    issued_ns: int = 0
    done_ns: int = 0
    backwards: int = 0
    call: CallFacts = CallFacts()
    called: str = ""
    purpose: str = ""

    @property
    def is_point_to_point(self) -> bool:
        """True for sends and receives."""
        return self.operation in ("send", "recv")

    @property
    def place(self) -> Place | None:
        """The innermost line of the user's code."""
        return self.path[-1] if self.path else None

    @property
    def over(self) -> bool:
        """True if it is over on this rank."""
        return self.phase in (Phase.DONE, Phase.FAILED, Phase.REFUSED)


@dataclass(frozen=True, slots=True)
class Collectives:
    """The collectives that the ranks issued: per rank of the session, in the order of issue.

    The ring of a rank is bounded: `first` is the number of its oldest record here, 0 when
    none was dropped. `groups` has the members of each group, as ranks of the session.
    """

    of: Mapping[int, tuple[Collective, ...]] = dataclasses.field(default_factory=dict)
    groups: Mapping[str, Ranks] = dataclasses.field(default_factory=dict)
    first: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def pending(self, rank: int) -> tuple[Collective, ...]:
        """The collective that `rank` has issued, or is paused before, and that is not over."""
        return tuple(record for record in self.of.get(rank, ()) if not record.over)

    def table(self) -> CollectiveTable:
        """Return them as files have them: the columns once, and each path once."""
        paths: dict[tuple[Place, ...], int] = {}
        rows = []
        for issued in self.of.values():
            for collective in issued:
                row = list(_ROW(collective))
                row[_PATH] = paths.setdefault(collective.path, len(paths))
                rows.append(row)
        return CollectiveTable(
            tuple(self.of),
            _COLUMNS,
            tuple(rows),
            tuple(paths),
            self.groups,
            self.first,
        )


_OF_CALL = tuple(field.name for field in dataclasses.fields(CallFacts))
_OWN = tuple(field.name for field in dataclasses.fields(Collective) if field.name != "call")
_COLUMNS = (*_OWN, *_OF_CALL)
_PATH = _COLUMNS.index("path")
_ROW = attrgetter(*_OWN, *(f"call.{name}" for name in _OF_CALL))


@dataclass(frozen=True, slots=True)
class CollectiveTable:
    """Collectives as a table: there are thousands, and few distinct paths.

    A row has a value for each of `columns`; in place of a path is its index in `paths`.
    """

    ranks: Ranks
    columns: tuple[str, ...]
    rows: tuple[Any, ...]
    paths: tuple[tuple[Place, ...], ...]
    groups: Mapping[str, Ranks]
    first: Mapping[int, int]

    def collectives(self) -> Collectives:
        """Return the collectives of which this is the table. Raises DecodeError."""
        issued: dict[int, list[Collective]] = {rank: [] for rank in self.ranks}
        for number, row in enumerate(self.rows):
            if not isinstance(row, list) or len(row) != len(self.columns):
                raise DecodeError(f"must be a list of {len(self.columns)}", f"rows[{number}]")
            wire = dict(zip(self.columns, row, strict=True))
            path = wire.pop("path", None)
            wire["call"] = {name: wire.pop(name) for name in _OF_CALL if name in wire}
            if not isinstance(path, int) or not 0 <= path < len(self.paths):
                raise DecodeError("is not the index of a path", f"rows[{number}]")
            made = dataclasses.replace(codec.decode(Collective, wire), path=self.paths[path])
            if made.rank not in issued:
                raise DecodeError(f"is of rank {made.rank}, which is missing", f"rows[{number}]")
            issued[made.rank].append(made)
        of = {rank: tuple(records) for rank, records in issued.items()}
        return Collectives(of, self.groups, self.first)
