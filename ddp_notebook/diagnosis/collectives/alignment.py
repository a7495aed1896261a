"""Compare the collectives of the ranks, as sequences, and find where a rank deviates.

A slot is a collective's sequence number in its group. Slots say which calls met; the lines of
code say which were meant to meet. A rank with one collective too many, or too few, is out of
step from there to the end, though each slot may look right by itself. So the sequences are
compared as a whole (Myers' diff). Healthy ones are equal, or one is the beginning of the other,
and to see that costs one number per record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import takewhile
from typing import TypeAlias

from ddp_notebook.model import Collective, Collectives, Part, Phase, Ranks

CallSite: TypeAlias = tuple[str, tuple[tuple[str, int], ...]]
"""The operation and the lines of code that lead to it, without shapes and labels."""

_Keys: TypeAlias = tuple[int, ...]

MOST_EDITS = 40
"""Lists that differ in more places are not compared further."""
MOST_STEPS = 40_000
"""Comparisons that take more steps than this are abandoned."""


@dataclass(frozen=True)
class RankSequence:
    """The collectives of one rank in one group, in consecutive slots.

    `keys` has a number for each record; equal numbers, here and on other ranks of the same
    alignment, mean the same lines, operation, shapes and labels.
    """

    rank: int
    first: int
    """The slot of the oldest record."""
    records: tuple[Collective, ...]
    keys: tuple[int, ...]

    @property
    def end(self) -> int:
        """The slot of its next collective."""
        return self.first + len(self.records)

    def at(self, slot: int) -> Collective | None:
        """Its record in `slot`."""
        index = slot - self.first
        return self.records[index] if 0 <= index < len(self.records) else None

    @cached_property
    def labels(self) -> Mapping[CallSite, frozenset[str]]:
        """The labels at each call site."""
        found: dict[CallSite, set[str]] = {}
        for record in dict(zip(self.keys, self.records, strict=True)).values():
            if record.label:
                found.setdefault(call_site(record), set()).add(record.label)
        return {where: frozenset(texts) for where, texts in found.items()}

    @cached_property
    def call_sites(self) -> Mapping[CallSite, int]:
        """The first slot of each call site in this sequence."""
        found: dict[CallSite, int] = {}
        seen: set[int] = set()
        for index, key in enumerate(self.keys):
            if key not in seen:
                seen.add(key)
                found.setdefault(call_site(self.records[index]), self.first + index)
        return found


@dataclass(frozen=True)
class Edit:
    """A range where two sequences differ, with both sides' records.

    Both begin at slots of their own sequence. Either may be empty: the other has more there.
    """

    own_at: int
    own: tuple[Collective, ...]
    other_at: int
    other: tuple[Collective, ...]
    last: bool
    """No common record follows: at least one sequence ends here."""

    @property
    def in_step(self) -> bool:
        """True when both begin at the same slot."""
        return self.own_at == self.other_at


@dataclass(frozen=True)
class Deviation:
    """Ranks that issued the same as each other, and not what the reference did.

    `sure` is true if more ranks agree with the reference than with these: then these are the
    minority. Otherwise only the edits say which side is right.
    """

    ranks: Ranks
    others: Ranks
    """The ranks that agree with the reference up to their own end."""
    sequence: RankSequence
    reference: RankSequence
    sure: bool

    @cached_property
    def edits(self) -> tuple[Edit, ...]:
        """The ranges where both differ, in order."""
        return tuple(differences(self.sequence, self.reference))


@dataclass(frozen=True)
class Alignment:
    """The sequences of one group: those that diverged, and those that are only behind."""

    group: str
    sequences: Mapping[int, RankSequence]
    deviations: tuple[Deviation, ...]


def align_all(collectives: Collectives) -> dict[str, Alignment]:
    """The alignment of every group."""
    numbering = _Numbering()
    lists: dict[str, dict[int, list[Collective]]] = {}
    for rank, records in collectives.of.items():
        for record in records:
            if record.operation not in ("send", "recv"):
                lists.setdefault(record.group, {}).setdefault(rank, []).append(record)
    alignments = {}
    for group, of in lists.items():
        # A refused collective takes no slot: the rank's next call has the same number. So of one
        # slot a rank may have two records, and a sequence has room for one. Which of them counts
        # depends on how it went on. If every rank called again, and that was accepted, the later
        # records are what met. If the last record of some rank in the slot is still the refusal,
        # nothing met there at all, and what each rank called first shows how they differ.
        refused = {r.slot for records in of.values() for r in records if r.phase is Phase.REFUSED}
        last = [{r.slot: r for r in records} for records in of.values()] if refused else []
        open_ = {s for s in refused for e in last if s in e and e[s].phase is Phase.REFUSED}
        for rank, issued in of.items() if open_ else ():
            first = {r.slot: r for r in reversed(issued)}
            of[rank] = [r for r in issued if r.slot not in open_ or r is first[r.slot]]
        sequences = {rank: numbering.sequence(rank, issued) for rank, issued in of.items()}
        alignments[group] = align(group, sequences)
    return alignments


def align_programs(collectives: Collectives) -> Alignment:
    """All collectives of each rank as one sequence, whatever their groups are; without messages.

    Groups with a common name, or with equally many members, count as one. Nothing is aligned if
    records of a rank were dropped.
    """
    numbering = _Numbering()
    sequences: dict[int, RankSequence] = {}
    for rank, records in collectives.of.items():
        # Slots are counted anew here, over all groups, from a rank's first record on. They are the
        # same place of the program on all ranks only if that is the first thing it issued.
        if collectives.first.get(rank):
            return Alignment("", {}, ())
        issued = [
            replace(record, slot=slot)
            for slot, record in enumerate(
                other
                for other in records
                if not other.is_point_to_point and other.phase is not Phase.REFUSED
            )
        ]
        if issued:
            sequences[rank] = numbering.sequence(rank, issued, collectives.groups)
    return align("", sequences)


def align(group: str, sequences: Mapping[int, RankSequence]) -> Alignment:
    """Find the ranks that diverge from the majority, slot by slot from the oldest common one."""
    # Logs are rings, so a rank that has called more has dropped more. Where one sequence has no
    # records, equality of the others says nothing: only the part that all still have is compared.
    start = max((sequence.first for sequence in sequences.values()), default=0)
    ranks_of: dict[_Keys, list[int]] = {}
    for rank in sorted(sequences):
        sequence = sequences[rank]
        ranks_of.setdefault(sequence.keys[max(0, start - sequence.first) :], []).append(rank)
    # At the first slot where lists differ each rank that got there has a vote. Not one vote over
    # whole sequences: a rank that only is behind would differ from all that are ahead, and two
    # ranks that strayed at different slots would split the majority. So the walk goes from slot to
    # slot. Where the sequences that are left differ, only ranks that got there vote; those that
    # chose otherwise leave the walk, and all that follows in them is a consequence. What is left at
    # the end are sequences of which each begins the longest one. A tie is kept as a tie (`sure` is
    # false): the lowest rank's side goes on as the reference, for want of a better one, which says
    # nothing about who is right.
    alive = sorted(ranks_of, key=lambda keys: ranks_of[keys][0])
    parted: list[tuple[_Keys, bool]] = []
    while alive:
        longest = max(alive, key=len)
        common = {keys: _common(keys, longest) for keys in alive}
        slot = min((each for keys, each in common.items() if each < len(keys)), default=None)
        if slot is None:
            break
        votes: dict[int, int] = {}
        for keys in alive:
            if len(keys) > slot:
                votes[keys[slot]] = votes.get(keys[slot], 0) + len(ranks_of[keys])
        most = max(votes.values())
        chosen = next(key for key, count in votes.items() if count == most)
        parted.extend(
            (keys, votes[keys[slot]] < most)
            for keys in alive
            if len(keys) > slot and keys[slot] != chosen
        )
        alive = [keys for keys in alive if len(keys) <= slot or keys[slot] == chosen]
    if not parted:
        return Alignment(group, sequences, ())
    reference = _from(sequences[ranks_of[max(alive, key=len)][0]], start)
    others = tuple(sorted(rank for keys in alive for rank in ranks_of[keys]))
    deviations = []
    for keys, sure in parted:
        ranks = tuple(ranks_of[keys])
        own = _from(sequences[ranks[0]], start)
        deviations.append(Deviation(ranks, others, own, reference, sure))
    return Alignment(group, sequences, tuple(deviations))


def _from(sequence: RankSequence, slot: int) -> RankSequence:
    skip = max(0, slot - sequence.first)
    if not skip:
        return sequence
    return RankSequence(sequence.rank, slot, sequence.records[skip:], sequence.keys[skip:])


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of equal keys at the beginning of both."""
    # Slices of tuples are compared in C: on healthy jobs of thousands of ranks nearly all of the
    # time of an alignment is spent here.
    end = min(len(one), len(other))
    at = 0
    while at < end and one[at : at + 512] == other[at : at + 512]:
        at += 512
    while at < end and one[at] == other[at]:
        at += 1
    return min(at, end)


# -- one number per record ---------------------------------------------------------------


def call_site(record: Collective) -> CallSite:
    """The call site: the operation, and every line that leads to it."""
    name = f"{record.api}/{record.operation}"
    return name, tuple((place.file, place.line) for place in record.path)


_OF_ANY_SIZE = frozenset({"all_to_all", "all_to_all_single"})
"""Operations in which ranks may contribute different amounts."""


class _Numbering:
    """Assigns equal numbers to equivalent records, across all ranks."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}
        self._paths: dict[object, int] = {}

    def sequence(
        self,
        rank: int,
        records: Sequence[Collective],
        groups: Mapping[str, Ranks] | None = None,
    ) -> RankSequence:
        """The records of a rank, with their keys; those of other `groups`, if given, differ."""
        records = _consecutive(records)
        numbers = self._numbers
        paths: dict[int, int] = {}  # a loop's records mostly share one path
        keys = []
        for record in records:
            path = record.path
            lines = paths.get(id(path))
            if lines is None:
                where = tuple([(place.file, place.line) for place in path])
                lines = paths[id(path)] = self._paths.setdefault(where, len(self._paths))
            any_size = record.operation in _OF_ANY_SIZE
            what: tuple[object, ...] = (
                record.operation,
                record.api,
                () if any_size else record.shape,
                record.dtype,
                0 if any_size else record.numel,
                record.tensors,
                record.reduce_op,
                record.root,
                record.label,
                lines,
            )
            if groups is not None:
                # Over all groups at once, the rank of a row is compared with that of another row:
                # names of groups, and roots in them, differ between these though nothing is wrong.
                kind = record.called or len(groups.get(record.group, ()))
                root = None if record.root is None else "a root"  # of its own in each group
                what = (*what[:7], root, *what[8:], kind)
            keys.append(numbers.setdefault(what, len(numbers)))
        return RankSequence(rank, records[0].slot, tuple(records), tuple(keys))


def _consecutive(records: Sequence[Collective]) -> Sequence[Collective]:
    """The latest records whose slots follow on each other; of two in one slot the later."""
    if records[-1].slot - records[0].slot == len(records) - 1:
        return records
    by_slot = {record.slot: record for record in records}
    first = last = max(by_slot)
    while first - 1 in by_slot:
        first -= 1
    return [by_slot[slot] for slot in range(first, last + 1)]


# -- differences -------------------------------------------------------------------------


def differences(own: RankSequence, other: RankSequence) -> Iterator[Edit]:
    """The ranges where two sequences differ, as few and short as possible.

    Lists with little in common give one edit, from their first difference to their ends.
    """
    # The ends are cut off first: what is left is short on real jobs, also after 100,000 equal
    # records, and the search below takes the square of the number of edits.
    mine, theirs = own.keys, other.keys
    begin = _common(mine, theirs)
    end = _common(mine[begin:][::-1], theirs[begin:][::-1])
    middle = mine[begin : len(mine) - end], theirs[begin : len(theirs) - end]
    for a, b, c, d in _edits(*middle):
        own_slice = slice(begin + a, begin + b)
        other_slice = slice(begin + c, begin + d)
        yield Edit(
            own.first + begin + a,
            own.records[own_slice],
            other.first + begin + c,
            other.records[other_slice],
            last=begin + b == len(mine) or begin + d == len(theirs),
        )


def _edits(mine: Sequence[int], theirs: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Slices (of `mine`, of `theirs`) that differ: the shortest edit script, after Myers."""
    # Diagonal k holds the positions x - y = k; `reached[k]` is the furthest x on it that so many
    # edits lead to. Each round allows one edit more and then follows equal keys for nothing. The
    # rounds are recorded, and `_slices` walks them back. Programs with nothing in common would take
    # the product of their lengths, so both the edits and the steps are bounded: beyond that one
    # edit covers all, which is as much as anyone could read of it.
    steps = 0
    reached = {1: 0}
    trace: list[dict[int, int]] = []
    for edits in range(min(len(mine) + len(theirs), MOST_EDITS) + 1):
        trace.append(dict(reached))
        for diagonal in range(-edits, edits + 1, 2):
            down = diagonal == -edits or (
                diagonal != edits and reached.get(diagonal - 1, -1) < reached.get(diagonal + 1, -1)
            )
            x = reached[diagonal + 1] if down else reached[diagonal - 1] + 1
            y = x - diagonal
            while x < len(mine) and y < len(theirs) and mine[x] == theirs[y]:
                x, y, steps = x + 1, y + 1, steps + 1
            reached[diagonal] = x
            if x >= len(mine) and y >= len(theirs):
                return _slices(trace, len(mine), len(theirs))
        steps += edits
        if steps > MOST_STEPS:
            break
    return [(0, len(mine), 0, len(theirs))]


def _slices(trace: Sequence[Mapping[int, int]], x: int, y: int) -> list[tuple[int, int, int, int]]:
    """Walk the trace of `_edits` back, and join edits that touch."""
    found: list[tuple[int, int, int, int]] = []
    for edits in range(len(trace) - 1, 0, -1):
        reached, diagonal = trace[edits], x - y
        down = diagonal == -edits or (
            diagonal != edits and reached.get(diagonal - 1, -1) < reached.get(diagonal + 1, -1)
        )
        before = reached[diagonal + 1] if down else reached[diagonal - 1]
        from_x, from_y = before, before - (diagonal + 1 if down else diagonal - 1)
        to_x, to_y = (from_x, from_y + 1) if down else (from_x + 1, from_y)
        if found and (found[-1][0], found[-1][2]) == (to_x, to_y):
            _, b, _, d = found[-1]
            found[-1] = (from_x, b, from_y, d)
        else:
            found.append((from_x, to_x, from_y, to_y))
        x, y = from_x, from_y
    return found[::-1]


# -- compare -----------------------------------------------------------------------------
# Whether two records can be one collective: operation, shape, dtype, op, root, label.


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
    # The first difference is told, and what explains most comes first: another operation, or a
    # group of another mesh dimension, mostly brings another dtype and shape along. What may differ
    # by torch's rules, as shapes in an all_to_all do, is no difference.
    if one.operation != other.operation:
        return Difference.OPERATION
    if _differ(one.called, other.called):
        return Difference.GROUP
    if one.operation in _SAME_DTYPE and _differ(one.dtype, other.dtype):
        return Difference.DTYPE
    known = one.operation in _SAME_SHAPE and one.dtype and other.dtype
    if known and _extent(one) != _extent(other):
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
    # Two sequences may differ and still be right: other lines that call the same, or one rank that
    # is further on. What is looked for is the first place from which on numbers no longer mean the
    # same call on both sides, or at which what met cannot be one collective.
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
    # Only near the fault: in a long run the same call comes again sooner or later, and every call
    # that was left out would count as moved.
    near = [edit for edit in deviation.edits if 0 <= edit.other_at - fault.other_at <= 64]
    own = Counter(_identity(record) for edit in near for record in edit.own)
    other = Counter(_identity(record) for edit in near for record in edit.other)
    return bool(own) and own == other


def _identity(record: Collective) -> tuple[object, ...]:
    """Identifies a collective among its neighbours, independent of its position."""
    rest = record.numel, record.tensors, record.reduce_op, record.root, record.label
    return call_site(record), record.shape, record.dtype, *rest


# -- buckets -----------------------------------------------------------------------------
# DDP's buckets of gradients: what a rank did not reduce of a backward pass.


class MissingBuckets(Enum):
    """The buckets that are missing from a rank's backward pass."""

    SOME = "some buckets"
    ALL_AFTER_FORWARD = "all buckets, and its forward was there"
    ALL = "all buckets"


def missing_buckets(
    full: RankSequence,
    full_at: int,
    short: RankSequence,
    short_at: int,
    ahead: Sequence[Collective],
) -> MissingBuckets | None:
    """The buckets missing from the short sequence where the full one has the collectives `ahead`.

    None if the full one has no bucket there.
    """
    bucket = full.at(full_at)
    if bucket is None or bucket.part is not Part.BACKWARD:
        return None
    # The reducer calls all_reduce for a bucket as soon as its gradients are there, from inside of
    # backward, so all buckets of a pass come from one line of the user's. What separates two passes
    # of one loop is only that each begins with the same bucket, as the first of them did.
    begin = full_at
    while _is_bucket_of(full.at(begin - 1), bucket):
        begin -= 1
    first = _key(full, begin)
    # DDP issues the buckets of a pass without waiting for each: all of them may be there.
    count = sum(1 for _ in takewhile(lambda each: call_site(each) == call_site(ahead[0]), ahead))
    after = full.at(full_at + count)
    same_pass = _is_bucket_of(after, bucket) and _key(full, full_at + count) != first
    if _key(full, full_at) != first or same_pass:
        return MissingBuckets.SOME
    last = short.at(short_at - 1)
    if last is not None and last.part is Part.FORWARD:
        return MissingBuckets.ALL_AFTER_FORWARD
    return MissingBuckets.ALL


def _is_bucket_of(record: Collective | None, like: Collective) -> bool:
    """True of a bucket that is reduced at the same lines."""
    if record is None or record.part is not Part.BACKWARD:
        return False
    return call_site(record) == call_site(like)


def _key(sequence: RankSequence, slot: int) -> int:
    return sequence.keys[slot - sequence.first]
