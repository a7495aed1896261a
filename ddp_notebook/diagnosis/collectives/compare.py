"""Whether two records can be one collective: operation, shape, dtype, op, root, label."""

from __future__ import annotations

from collections import Counter
from enum import Enum

from ddp_notebook.diagnosis.collectives.alignment import Deviation, Edit, call_site
from ddp_notebook.model import Collective, Phase

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
_SAME_DTYPE = _SAME_SHAPE | {"all_to_all", "all_to_all_single"}
_ALL_TENSORS = frozenset({"all_reduce", "broadcast", "reduce"})
"""Operations of which every tensor, not only the first, is the same on all ranks."""

_NEAR = 64
"""Window in which a missing collective that follows later counts as moved, not omitted."""


class Difference(Enum):
    """The property in which two collectives with one sequence number differ."""

    OPERATION = "operation"
    DTYPE = "dtype"
    SHAPE = "shape"
    REDUCE_OP = "ReduceOp"
    ROOT = "root"
    LABEL = "label"
    GROUP = "group"


def difference(one: Collective, other: Collective) -> Difference | None:
    """The mismatch that prevents two records from being one collective; None without one.

    A label is the name that the line gives it, as of a metric: it only counts where both are at
    one line, and where data is combined under it.
    """
    if one.operation != other.operation:
        return Difference.OPERATION
    if _differ(one.called, other.called):
        return Difference.GROUP
    if one.operation in _SAME_DTYPE and _differ(one.dtype, other.dtype):
        return Difference.DTYPE
    if one.operation in _SAME_SHAPE and one.dtype and other.dtype and _other_extent(one, other):
        return Difference.SHAPE
    if _differ(one.reduce_op, other.reduce_op):
        return Difference.REDUCE_OP
    if _differ(one.root, other.root):
        return Difference.ROOT
    if one.operation != "barrier" and _differ(one.label, other.label):
        return Difference.LABEL if call_site(one) == call_site(other) else None
    return None


def _differ(one: object, other: object) -> bool:
    """True when both are known and not equal."""
    return one not in (None, "") and other not in (None, "") and one != other


def _other_extent(one: Collective, other: Collective) -> bool:
    if one.shape == other.shape and one.numel == other.numel and one.tensors == other.tensors:
        return False
    return _extent(one) != _extent(other)


def _extent(record: Collective) -> tuple[object, ...]:
    """The shape without dimensions of size 1, which change nothing, and the number of elements."""
    shape = tuple(size for size in record.shape if size != 1)
    return (shape, record.numel, record.tensors) if record.operation in _ALL_TENSORS else (shape,)


def first_conflict(deviation: Deviation) -> tuple[int, Difference] | None:
    """The first number under which two sequences have what cannot be one collective: a proof."""
    own, other = deviation.sequence, deviation.reference
    known: dict[tuple[int, int], Difference | None] = {}
    for slot in range(max(own.first, other.first), min(own.end, other.end)):
        a, b = slot - own.first, slot - other.first
        pair = own.keys[a], other.keys[b]
        if pair[0] == pair[1]:
            continue
        if pair not in known:
            known[pair] = difference(own.records[a], other.records[b])
        what = known[pair]
        if what is None and _refused_elsewhere(own.records[a], other.records[b]):
            what = Difference.SHAPE
        if what is None:
            continue
        if what is not Difference.LABEL or labels_are_shared(deviation, own.records[a]):
            return slot, what
    return None


def labels_are_shared(deviation: Deviation, record: Collective) -> bool:
    """True if the texts at this line are names that ranks share, not each rank's own data.

    Names of files or shards may differ between ranks. Names of metrics are recognised by this: most
    ranks have the same one there, or both sides share some names.
    """
    if deviation.sure and len(deviation.others) > 1:
        return True
    where = call_site(record)
    own, other = deviation.sequence.labels, deviation.reference.labels
    return not own.get(where, frozenset()).isdisjoint(other.get(where, frozenset()))


def harmless(edit: Edit) -> bool:
    """True if the records that met in an edit match: other lines, the same collectives.

    ``if rank == 0`` and its `else` may each have their own barrier. Labels are judged elsewhere.
    """
    if not edit.in_step or (len(edit.own) != len(edit.other) and not edit.last):
        return False
    if any(map(_refused_elsewhere, edit.own, edit.other)):
        return False
    return all(
        difference(a, b) in (None, Difference.LABEL)
        for a, b in zip(edit.own, edit.other, strict=False)
    )


def _refused_elsewhere(one: Collective, other: Collective) -> bool:
    """True when they were kept from meeting, and are not even called at one line."""
    refused = Phase.REFUSED in (one.phase, other.phase)
    return refused and call_site(one) != call_site(other)


def first_fault(deviation: Deviation) -> Edit | None:
    """The first edit in which the sequences get out of step, or have mismatched collectives.

    An edit that matches until one of the sequences ends is not a fault: that rank is slower or has
    stopped, which its activity shows.
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
    """True if the surplus at the fault is what is missing a little later: another order."""
    near = [edit for edit in deviation.edits if 0 <= edit.other_at - fault.other_at <= _NEAR]
    own = Counter(_identity(record) for edit in near for record in edit.own)
    other = Counter(_identity(record) for edit in near for record in edit.other)
    return bool(own) and own == other


def _identity(record: Collective) -> tuple[object, ...]:
    """Identifies a collective among its neighbours, independent of its position."""
    rest = record.numel, record.tensors, record.reduce_op, record.root, record.label
    return call_site(record), record.shape, record.dtype, *rest
