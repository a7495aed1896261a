"""Rules about what met in one slot and cannot be one: shape, dtype, operation, root, name."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_notebook.diagnosis.collectives.alignment import Block, Deviation, Track, site
from ddp_notebook.diagnosis.collectives.compare import Difference, difference, labels_are_shared
from ddp_notebook.diagnosis.context import Picture, called, fact
from ddp_notebook.model import Category, Collective, Finding, Phase, Ranks, name_ranks

_CATEGORIES = {
    Difference.SHAPE: Category.SHAPE_MISMATCH,
    Difference.DTYPE: Category.DTYPE_MISMATCH,
    Difference.OPERATION: Category.OP_MISMATCH,
    Difference.REDUCE_OP: Category.OP_MISMATCH,
    Difference.ROOT: Category.OP_MISMATCH,
    Difference.LABEL: Category.MISMATCHED_ORDER,
}

_REMEDIES = {
    Difference.SHAPE: (
        "Give it one shape on all ranks: exchange the sizes, pad to the largest, cut afterwards."
    ),
    Difference.DTYPE: "Convert the tensor to one dtype on all ranks before this line.",
    Difference.OPERATION: "Call the same collective on all ranks at this place.",
    Difference.REDUCE_OP: "Use the same op= on all ranks.",
    Difference.ROOT: "Name the same rank as src= or dst= on all ranks.",
    Difference.LABEL: "Go through the same names in the same order on every rank.",
}


def mismatch(picture: Picture, deviation: Deviation, fault: Block) -> Finding | None:
    """The finding of a slot that both sides meant, and filled differently."""
    pairs = zip(fault.own, fault.other, strict=False)
    found = ((a, b, what) for a, b in pairs if (what := difference(a, b)) is not None)
    own, other, what = next(found, (None, None, None))
    if own is None or other is None or what is None:
        return None
    fits = what is Difference.LABEL
    if _other_names(deviation, own, other):
        what = Difference.LABEL
    culprits = _odd(deviation, own, other)
    sides = ((deviation.ranks, own, other), (deviation.others, other, own))
    said = [
        f"{name_ranks(ranks)} {_has(ranks)} {_value(mine, theirs, what)}"
        for ranks, mine, theirs in sorted(sides, key=lambda side: side[0] != culprits)
    ]
    place = f" at {own.place}" if own.place else ""
    if other.place and own.place and other.place != own.place:
        place += f" and {other.place}"
    name = called(own) if what is not Difference.LABEL else own.operation
    if what is Difference.OPERATION:
        name = "one slot"
    return Finding(
        _CATEGORIES[what],
        culprits,
        f"in {name}{place}, {said[0]}, {said[1]}",
        _REMEDIES[what],
        () if fits else tuple(rank for rank in picture.victims if rank not in culprits),
        (fact(deviation.ranks, own), fact(deviation.others, other)),
    )


def _other_names(deviation: Deviation, own: Collective, other: Collective) -> bool:
    """True when one line has names of its own on both sides: another thing has another shape."""
    named = bool(own.label and other.label) and own.label != other.label
    return named and site(own) == site(other) and labels_are_shared(deviation, own)


def passed_over(picture: Picture) -> Iterator[Finding]:
    """Ranks that were refused a collective, went on without it, and lack one now."""
    told: set[int] = set()
    for waiter in picture.graph.stuck:
        record = picture.graph.at.get(waiter)
        alignment = picture.alignments.get(record.group) if record is not None else None
        full = alignment.tracks.get(waiter) if alignment is not None else None
        if alignment is None or full is None:
            continue
        for rank in picture.graph.waits[waiter]:
            short = alignment.tracks.get(rank)
            found = _lacks_refused(picture, short, full) if short is not None else None
            if found is not None and rank not in told:
                told.add(rank)
                yield found


def _lacks_refused(picture: Picture, short: Track, full: Track) -> Finding | None:
    """The refused collective, if it came as often as the others' with it, and not without it."""
    kept = {record.number for record in short.records}
    for record in picture.case.collectives.of[short.rank]:
        there = full.at(record.slot)
        if record.phase is not Phase.REFUSED or record.number in kept or there is None:
            continue
        what = difference(record, there)
        times = [sum(site(each) == site(record) for each in of.records) for of in (short, full)]
        if record.group != there.group or what is None or times[0] >= times[1]:
            continue
        rank, other = name_ranks((short.rank,)), name_ranks((full.rank,))
        return Finding(
            _CATEGORIES[what],
            (short.rank,),
            f"{rank} was refused {called(record)} at {record.place} and went on without it: there "
            f"it had {_value(record, there, what)}, {other} had {_value(there, record, what)}",
            _REMEDIES[what],
            tuple(each for each in picture.victims if each != short.rank),
            (
                fact((short.rank,), record),
                fact((full.rank,), there),
                f"{rank} was {times[0]} times there, {other} {times[1]} times",
            ),
        )
    return None


def _odd(deviation: Deviation, own: Collective, other: Collective) -> Ranks:
    """The culprits. Right are the most; else who does as before; else the root.

    Where nothing else tells, the lowest rank is taken for right.
    """
    ranks, others = deviation.ranks, deviation.others
    if deviation.sure:
        return ranks
    usual_own = _usual(deviation.track, own)
    usual_other = _usual(deviation.reference, other)
    if usual_own != usual_other:
        return others if usual_own else ranks
    if own.root is not None and own.root == other.root and own.root in (*ranks, *others):
        return others if own.root in ranks else ranks
    return ranks if min(others) < min(ranks) else others


def _usual(track: Track, record: Collective) -> bool:
    """True when the rank has had the same in an earlier slot."""
    index = record.slot - track.first
    return index > 0 and track.keys[index] in track.keys[:index]


def _has(ranks: Ranks) -> str:
    return "has" if len(ranks) == 1 else "have"


def _value(mine: Collective, theirs: Collective, what: Difference) -> str:
    """What one side has there."""
    match what:
        case Difference.OPERATION:
            return called(mine)
        case Difference.DTYPE:
            return mine.dtype
        case Difference.SHAPE if mine.shape == theirs.shape:
            return f"{mine.numel} elements in {mine.tensors} tensors"
        case Difference.SHAPE:
            return f"shape {list(mine.shape)}"
        case Difference.REDUCE_OP:
            return f"op={mine.reduce_op}"
        case Difference.ROOT:
            return f"root {mine.root}"
        case _:
            return repr(mine.label)
