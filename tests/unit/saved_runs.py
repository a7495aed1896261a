"""Saved runs for tests: one of any values, and one of a small job with a rank that is stuck."""

from __future__ import annotations

import collections.abc
import dataclasses
import types
import typing
from enum import Enum
from functools import cache
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import structs
from traces import report

from ddp_notebook.archive.format import SavedRun
from ddp_notebook.model import (
    Activity,
    AnyEvent,
    Case,
    CellStarted,
    Collective,
    Collectives,
    Moment,
    Output,
    Phase,
    Place,
    RankReport,
    RankSpawned,
    RankState,
    Snapshot,
    Stage,
    StageFinished,
    StageStarted,
    Status,
)

MS = 1_000_000
WALL_NS = 1_700_000_000_000_000_000


@cache  # to make a strategy takes longer than to draw from it
def any_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type, by the types of their fields."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return st.integers(-9, 9) | st.text(max_size=3)
    if origin in (typing.Union, types.UnionType):
        return st.none() | any_of(next(each for each in inner if each is not types.NoneType))
    if origin is tuple and inner[-1] is not Ellipsis:
        return st.tuples(*map(any_of, inner))
    if origin is tuple:  # of those with fields of their own one: they lie in each other
        most = 1 if dataclasses.is_dataclass(inner[0]) else 2
        return st.lists(any_of(inner[0]), max_size=most).map(tuple)
    if origin is collections.abc.Mapping:
        return st.dictionaries(any_of(inner[0]), any_of(inner[1]), max_size=2)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(kind)
    if dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct):
        return dataclass_of(kind)  # type: ignore[arg-type]
    plain: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(2**63), 2**63),
        str: st.text(max_size=5),
        bool: st.booleans(),
        float: st.floats(allow_nan=False),
    }
    return plain[kind]


@cache
def dataclass_of(cls: type) -> st.SearchStrategy[Any]:
    """Values of a dataclass, or of an event."""
    return st.builds(cls, **{name: any_of(of) for name, of in typing.get_type_hints(cls).items()})


def of_ranks(values: list[Any]) -> tuple[Any, ...]:
    """The same, numbered as ranks."""
    return tuple(dataclasses.replace(each, rank=rank) for rank, each in enumerate(values))


@st.composite
def snapshots(draw: st.DrawFn, world_size: int) -> Snapshot:
    """States of so many ranks."""
    states = draw(st.lists(dataclass_of(RankState), min_size=world_size, max_size=world_size))
    return dataclasses.replace(draw(dataclass_of(Snapshot)), ranks=of_ranks(states))


@st.composite
def moments(draw: st.DrawFn, world_size: int) -> Moment:
    """Something that happened."""
    at_ns, until_ns = draw(any_of(int)), draw(any_of(int))
    if draw(st.booleans()):
        return Moment(at_ns, state=draw(snapshots(world_size)), until_ns=until_ns)
    event = draw(dataclass_of(draw(st.sampled_from(typing.get_args(AnyEvent)))))
    event = structs.replace(event, rank=draw(st.integers(-1, world_size - 1)))
    return Moment(at_ns, event, until_ns=until_ns)


@st.composite
def cases(draw: st.DrawFn, world_size: int) -> Case:
    """What is known of so many ranks."""
    evidence = st.lists(dataclass_of(RankReport), min_size=world_size, max_size=world_size)
    issued = {
        rank: tuple(
            dataclasses.replace(each, rank=rank)
            for each in draw(st.lists(dataclass_of(Collective), max_size=2))
        )
        for rank in range(world_size)
    }
    made = Collectives(issued, {"default": tuple(range(world_size))}, {0: draw(any_of(int))})
    bare = draw(dataclass_of(Case))
    return dataclasses.replace(bare, ranks=of_ranks(draw(evidence)), collectives=made)


@st.composite
def runs(draw: st.DrawFn) -> SavedRun:
    """Any saved run."""
    world_size = draw(st.integers(1, 2))
    bare = draw(
        st.builds(
            SavedRun,
            snapshot=snapshots(world_size),
            start=snapshots(world_size),
            wall_ns=any_of(int),
            outputs=st.lists(dataclass_of(Output), max_size=2).map(tuple),
            case=st.none() | cases(world_size),
            diagnosis=any_of(typing.get_type_hints(SavedRun)["diagnosis"]),
            script=st.text(max_size=3),
            run=any_of(int),
            versions=st.just({"torch": "2.13.0"}),
            dropped=any_of(typing.get_type_hints(SavedRun)["dropped"]),
        )
    )
    told = st.lists(moments(world_size), max_size=3).map(tuple)
    return dataclasses.replace(bare, moments=draw(told))


def collective(rank: int, number: int, begin_ms: float, end_ms: float | None) -> Collective:
    """An all_reduce of four floats; without an end it is not done."""
    return Collective(
        rank,
        number,
        "all_reduce",
        slot=number,
        shape=(4,),
        dtype="float32",
        bytes=16,
        path=(Place("train.py", 10 + number, text="dist.all_reduce(x)"),),
        phase=Phase.ISSUED if end_ms is None else Phase.DONE,
        issued_ns=int(begin_ms * MS),
        done_ns=0 if end_ms is None else int(end_ms * MS),
    )


def job(collectives: int = 2) -> SavedRun:
    """Two ranks, from 1,000 ms on the monotonic clock to 2,000; rank 1 left out the last one."""
    start = Snapshot(ranks=(RankState(0), RankState(1)), backend="gloo")
    told = [
        moment
        for rank in range(2)
        for moment in (
            _moment(RankSpawned(rank=rank, pid=100 + rank, device="cpu"), 1000),
            _moment(StageFinished(rank=rank, stage=Stage.LAUNCHED), 1100),
            _moment(StageStarted(rank=rank, stage=Stage.VERIFIED, waiting_for="all"), 1200),
            _moment(StageFinished(rank=rank, stage=Stage.VERIFIED, detail="gave 3"), 1300),
            _moment(CellStarted(rank=rank, cell=5, number=2), 1400),
        )
    ]
    of = {
        rank: tuple(
            collective(rank, number, 1400 + number + rank / 10, 1400.5 + number)
            for number in range(collectives - 1)
        )
        for rank in range(2)
    }
    of[0] = (*of[0], collective(0, collectives - 1, 1900, None))
    waiting = RankReport(0, Activity.WAITING, "collective", "train.py, line 12", path=of[0][0].path)
    failed = report(1, Activity.FAILED, error_type="ValueError", error_text="ValueError: no")
    case = Case((waiting, failed), collectives=Collectives(of, {"default": (0, 1)}, {0: 0}))
    end = tuple(
        RankState(rank, Status.RUNNING, Stage.VERIFIED, None, device="cpu", pid=100 + rank, cell=2)
        for rank in range(2)
    )
    return SavedRun(
        Snapshot(ranks=end, backend="gloo", taken_ns=2000 * MS),
        start,
        WALL_NS,
        tuple(sorted(told, key=lambda moment: moment.at_ns)),
        case=case,
        run=5,
    )


def _moment(event: Any, at_ms: int) -> Moment:
    """It was sent 10 ms before it was heard."""
    sent_ns = WALL_NS - (2000 - at_ms) * MS
    heard_ns = (at_ms + 10) * MS
    return Moment(heard_ns, structs.replace(event, time_ns=sent_ns, heard_ns=heard_ns))
