"""What the ranks' collectives were: one record each, as every rank's observer writes it down."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ddp_notebook.model.ranks import Ranks

DEFAULT_GROUP = "default"
"""How the default process group is called in records, whatever torch numbers it."""


class Phase(StrEnum):
    """How far a collective is on one rank."""

    HELD = "held"
    """It waits before it is issued until it is stepped on."""
    ISSUED = "issued"
    DONE = "done"
    FAILED = "failed"
    """torch raised an error, when it was issued or later."""
    REFUSED = "refused"
    """Never issued: what another rank has in this slot does not match."""


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
        return f"{self.file}:{self.line}" + (f" in {self.function}" if self.function else "")


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective, send or receive of one rank. Unknown is None, "" or ().

    `number` counts everything that the rank issued in this run, from 0; `slot` counts what it
    issued in `group`, sends and receives apart, so that equal slots of two ranks meet; one that
    was refused has the slot of what the rank issues next.
    `operation` is torch's own name (all_reduce, broadcast, ...), `api` the function that the
    user called (all_gather_object, backward, ...). `shape` and `dtype` are those of the first
    of `tensors` tensors, with `numel` elements in all. `root` and `peer` are ranks of the
    default group. `path` leads from the outermost line of the user's code to the innermost.
    `label` holds texts that the innermost line iterates over: the name of a metric.
    Times are CLOCK_MONOTONIC, the same clock for all ranks of a host; `done_ns` is when it was
    seen to be done, 0 for not yet. `backwards` is how many backward passes the rank had begun.
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
        """True when nobody waits for it any more."""
        return self.phase in (Phase.DONE, Phase.FAILED, Phase.REFUSED)


@dataclass(frozen=True, slots=True)
class Collectives:
    """What the ranks issued: per rank of the session, in the order of issue, oldest first.

    The ring of a rank is bounded: `first` is the number of its oldest record here, 0 when
    none was dropped. `groups` has the members of each group, as ranks of the session.
    """

    of: Mapping[int, tuple[Collective, ...]] = dataclasses.field(default_factory=dict)
    groups: Mapping[str, Ranks] = dataclasses.field(default_factory=dict)
    first: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def pending(self, rank: int) -> tuple[Collective, ...]:
        """What `rank` issued, or is held before, and is not over."""
        return tuple(each for each in self.of.get(rank, ()) if not each.over)


def collective_to_json(collective: Collective) -> dict[str, Any]:
    """A record as a JSON object."""
    return dataclasses.asdict(collective)


def collective_from_json(wire: Mapping[str, Any]) -> Collective:
    """The record that `collective_to_json` wrote. Raises TypeError or ValueError otherwise."""
    fields = dict(wire)
    fields["shape"] = tuple(fields["shape"])
    fields["path"] = tuple(Place(**each) for each in fields["path"])
    fields["part"] = Part(fields["part"]) if fields["part"] else None
    fields["phase"] = Phase(fields["phase"])
    return Collective(**fields)
