"""The operations that can be measured: sizes, bandwidth factors, names elsewhere.

To add one: a line here, and its expected result in `rank.bench.operations`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class Side(Enum):
    """The share of a size's elements that one side of an operation has on a rank."""

    NOTHING = "nothing"
    SHARE = "share"
    """One part of as many equal ones as there are ranks."""
    WHOLE = "whole"

    def elements(self, count: int, world_size: int) -> int:
        """The number of elements of this side's tensor, for a size of `count` elements."""
        return {Side.NOTHING: 0, Side.SHARE: count // world_size, Side.WHOLE: count}[self]


def _once(world_size: int) -> float:
    return 1.0 if world_size > 1 else 0.0


def _to_others(world_size: int) -> float:
    return (world_size - 1) / world_size


def _twice_to_others(world_size: int) -> float:
    return 2 * (world_size - 1) / world_size


def _none(_: int) -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. As in nccl-tests, a size is that of the larger side."""

    name: str
    method: str
    """Of torch.distributed."""
    bus_factor: Callable[[int], float]
    """The ratio of bus bandwidth to algorithm bandwidth, by world size: what each rank must at
    least send, in units of the size. From nccl-tests, doc/PERFORMANCE.md ("Bandwidth"). 0 if
    nothing is sent."""
    sends: Side = Side.WHOLE
    receives: Side = Side.NOTHING
    """NOTHING: the operation works in place."""
    shared: bool = False
    """Every rank has an equal share: the number of elements is a multiple of the world size."""
    root: int | None = None
    """The rank that has the tensor, if only one does."""
    reduces: bool = False
    ring_passes: int = 0
    """How many times the tensor goes around a ring of the ranks, if gloo uses a ring."""
    nccl_name: str = ""
    """The name in nccl-tests, if it differs."""

    @property
    def sized(self) -> bool:
        """False if there is no tensor: then the only size is 0."""
        return self.sends is not Side.NOTHING

    @property
    def in_place(self) -> bool:
        """True if there is no separate tensor for the result."""
        return self.receives is Side.NOTHING

    @property
    def buffers(self) -> int:
        """The most tensors of the full size that a rank needs."""
        return 1 if self.in_place else 2


OPS = (
    Op("all_reduce", "all_reduce", _twice_to_others, reduces=True, ring_passes=2),
    Op("broadcast", "broadcast", _once, root=0),
    Op(
        name="all_gather",
        method="all_gather_into_tensor",
        bus_factor=_to_others,
        sends=Side.SHARE,
        receives=Side.WHOLE,
        shared=True,
    ),
    Op(
        name="reduce_scatter",
        method="reduce_scatter_tensor",
        bus_factor=_to_others,
        receives=Side.SHARE,
        shared=True,
        reduces=True,
    ),
    Op(
        name="all_to_all",
        method="all_to_all_single",
        bus_factor=_to_others,
        receives=Side.WHOLE,
        shared=True,
        nccl_name="alltoall",
    ),
    Op("barrier", "barrier", _none, sends=Side.NOTHING),
)
OP_NAMES = tuple(op.name for op in OPS)
_BY_NAME = {op.name: op for op in OPS}


def op_named(name: str) -> Op:
    """The operation of this name; for one that only another version knows, just the name."""
    return _BY_NAME.get(name) or Op(name, name, _none)
