"""Whether two collectives can be one: operation, shape, dtype, op, root, label."""

from __future__ import annotations

from collections import Counter
from enum import Enum

from ddp_notebook.diagnosis.collectives.alignment import Deviation, Edit, call_site
from ddp_notebook.model import Collective

_SAME_SHAPE = frozenset(
    {
        "all_reduce",
        "broadcast",
        "reduce",
        "all_gather",
        "gather",
        "scatter",
        "all_gather_into_tensor",
        "reduce_scatter",
        "reduce_scatter_tensor",
    }
)
"""Operations whose first tensor has one shape on all ranks; all_to_all may split it anyhow."""
_ALL_TENSORS = frozenset({"all_reduce", "broadcast", "reduce"})
"""Operations of which every tensor, not only the first, is the same on all ranks."""

_NEAR = 64
"""Slots within which a collective that is missed and comes later was moved, not left out."""


class Difference(Enum):
    """In what two collectives of one slot differ."""

    OPERATION = "operation"
    DTYPE = "dtype"
    SHAPE = "shape"
    REDUCE_OP = "ReduceOp"
    ROOT = "root"
    LABEL = "label"


def difference(one: Collective, other: Collective) -> Difference | None:
    """What keeps two collectives from being one; None when they may well be.

    A label is what the line calls it, a metric's name: it only counts where the lines are one,
    and where data is combined under it.
    """
    if one.operation != other.operation:
        return Difference.OPERATION
    if one.operation in _SAME_SHAPE:
        if one.dtype and other.dtype and one.dtype != other.dtype:
            return Difference.DTYPE
        if one.dtype and other.dtype and _other_extent(one, other):
            return Difference.SHAPE
    if one.reduce_op and other.reduce_op and one.reduce_op != other.reduce_op:
        return Difference.REDUCE_OP
    if one.root is not None and other.root is not None and one.root != other.root:
        return Difference.ROOT
    named = one.label and other.label and one.operation != "barrier"
    if named and one.label != other.label and call_site(one) == call_site(other):
        return Difference.LABEL
    return None


def _other_extent(one: Collective, other: Collective) -> bool:
    if one.shape == other.shape and one.numel == other.numel and one.tensors == other.tensors:
        return False
    return _extent(one) != _extent(other)


def _extent(record: Collective) -> tuple[object, ...]:
    """Its shape, without dimensions of size 1: they change nothing; and how much in all."""
    shape = tuple(size for size in record.shape if size != 1)
    return (shape, record.numel, record.tensors) if record.operation in _ALL_TENSORS else (shape,)


def first_conflict(deviation: Deviation) -> tuple[int, Difference] | None:
    """The first slot in which two sequences have what cannot be one collective: proof by itself."""
    own, other = deviation.sequence, deviation.reference
    known: dict[tuple[int, int], Difference | None] = {}
    for slot in range(max(own.first, other.first), min(own.end, other.end)):
        a, b = slot - own.first, slot - other.first
        pair = own.keys[a], other.keys[b]
        if pair[0] == pair[1]:
            continue
        if pair not in known:
            known[pair] = difference(own.records[a], other.records[b])
        found = known[pair]
        if found is not None and (
            found is not Difference.LABEL or labels_are_shared(deviation, own.records[a])
        ):
            return slot, found
    return None


def reordered(deviation: Deviation, fault: Edit | None) -> bool:
    """True when values were mixed up: the same in another order, and not only barriers."""
    if fault is None or not moved(deviation, fault):
        return False
    return any(each.operation != "barrier" for each in (*fault.own, *fault.other))


def labels_are_shared(deviation: Deviation, record: Collective) -> bool:
    """True when the texts at this line are names that ranks share, not each rank's own data.

    Files or shards differ from rank to rank, and rightly so. Metrics are known by this: most
    ranks have the same one there, or both sides have some of their names in common.
    """
    if deviation.sure and len(deviation.others) > 1:
        return True
    where = call_site(record)
    own, other = deviation.sequence.labels, deviation.reference.labels
    return not own.get(where, frozenset()).isdisjoint(other.get(where, frozenset()))


def harmless(edit: Edit) -> bool:
    """True when the slots of a edit met what they could: other lines, the same collectives.

    ``if rank == 0`` and its `else` may each have their own barrier. Labels are judged elsewhere.
    """
    if not edit.in_step or (len(edit.own) != len(edit.other) and not edit.last):
        return False
    return all(
        difference(a, b) in (None, Difference.LABEL)
        for a, b in zip(edit.own, edit.other, strict=False)
    )


def first_fault(deviation: Deviation) -> Edit | None:
    """The first edit in which the sequences get out of step, or have what cannot meet.

    A edit in which all is well until one of the sequences ends is no fault: that rank is slower,
    or has stopped, which is told by what the rank does.
    """
    for edit in deviation.edits:
        if not harmless(edit):
            return edit
        if any(
            a.label != b.label
            and difference(a, b) is Difference.LABEL
            and labels_are_shared(deviation, a)
            for a, b in zip(edit.own, edit.other, strict=False)
        ):
            return edit
    return None


def moved(deviation: Deviation, fault: Edit) -> bool:
    """True when what is too much at the fault is what lacks a little later: another order."""
    near = [each for each in deviation.edits if 0 <= each.other_at - fault.other_at <= _NEAR]
    own = Counter(site_and_more(each) for edit in near for each in edit.own)
    other = Counter(site_and_more(each) for edit in near for each in edit.other)
    return bool(own) and own == other


def site_and_more(record: Collective) -> tuple[object, ...]:
    """What tells a collective from its neighbours, wherever it stands."""
    rest = record.numel, record.tensors, record.reduce_op, record.root, record.label
    return call_site(record), record.shape, record.dtype, *rest
