"""Collectives of each rank as sequences, compared: which ranks deviate, and where.

A slot is a collective's sequence number in its group. Slots say what met; the lines of code say
what was meant to meet. A rank with one collective too many, or too few, is out of step from
there to the end, though each slot may look right by itself. So the sequences are compared as a
whole (Myers' diff). Healthy ones are equal, or one is the beginning of the other, and to see that
costs one number per record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from ddp_notebook.model import Collective, Collectives, Phase, Ranks

CallSite: TypeAlias = tuple[str, tuple[tuple[str, int], ...]]
"""The operation and the lines of code that lead to it, without shapes and labels."""

MOST_EDITS = 40
"""Lists that differ in more places are not compared further."""
MOST_STEPS = 40_000
"""Comparisons that take more steps than this are abandoned."""
_STRIDE = 512


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
    """The sequences of one group: those that diverged, and those that are only behind.

    `start` is the first slot of which all sequences have a record: older ones were dropped.
    """

    group: str
    sequences: Mapping[int, RankSequence]
    start: int
    reference: RankSequence | None
    agreeing: Ranks
    """Ranks whose sequence is the beginning of the reference, or all of it."""
    deviations: tuple[Deviation, ...]


def align_all(collectives: Collectives) -> dict[str, Alignment]:
    """The alignment of every group."""
    numbering = _Numbering()
    lists: dict[str, dict[int, list[Collective]]] = {}
    for rank, records in collectives.of.items():
        for record in records:
            if record.operation not in ("send", "recv"):
                lists.setdefault(record.group, {}).setdefault(rank, []).append(record)
    return {
        group: align(
            group,
            {
                rank: numbering.sequence(rank, records)
                for rank, records in _one_of_refused(of_ranks).items()
            },
        )
        for group, of_ranks in lists.items()
    }


def align_programs(collectives: Collectives) -> Alignment:
    """All collectives of each rank as one sequence, whatever their groups are; without messages.

    Groups with a common name, or with equally many members, count as one. Nothing is aligned if
    records of a rank were dropped.
    """
    numbering = _Numbering()
    sequences: dict[int, RankSequence] = {}
    for rank, records in collectives.of.items():
        if collectives.first.get(rank):
            return Alignment("", {}, 0, None, (), ())
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


def _one_of_refused(of: Mapping[int, list[Collective]]) -> Mapping[int, list[Collective]]:
    """The records with one in each slot, also of ranks that were refused one and called again.

    Where all ranks continued, what they issued last is what met. Where a rank did not, it is
    what they called first: the rest follows from that.
    """
    refused = {r.slot for records in of.values() for r in records if r.phase is Phase.REFUSED}
    if not refused:
        return of
    last = [{r.slot: r for r in records} for records in of.values()]
    open_ = {s for s in refused for each in last if s in each and each[s].phase is Phase.REFUSED}
    return {
        rank: [
            record
            for record, slots in zip(records, _so_far(records), strict=True)
            if record.slot not in open_ or slots == 1
        ]
        for rank, records in of.items()
    }


def _so_far(records: Sequence[Collective]) -> Iterator[int]:
    """For each record, how many of its slot there are up to it."""
    counted: Counter[int] = Counter()
    for record in records:
        counted[record.slot] += 1
        yield counted[record.slot]


def align(group: str, sequences: Mapping[int, RankSequence]) -> Alignment:
    """Find the ranks that diverge from the majority, slot by slot from the oldest common one."""
    start = max((sequence.first for sequence in sequences.values()), default=0)
    ranks_of: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted(sequences):
        sequence = sequences[rank]
        ranks_of.setdefault(sequence.keys[max(0, start - sequence.first) :], []).append(rank)
    agreeing, outvoted = _vote(ranks_of)
    if not agreeing:
        return Alignment(group, sequences, start, None, (), ())
    reference = sequences[ranks_of[max(agreeing, key=len)][0]]
    ranks = tuple(sorted(rank for keys in agreeing for rank in ranks_of[keys]))
    deviations = tuple(
        Deviation(
            tuple(ranks_of[keys]), ranks, _from(sequences[ranks_of[keys][0]], start), cut, sure
        )
        for cut in (_from(reference, start),)
        for keys, sure in outvoted
    )
    return Alignment(group, sequences, start, reference, ranks, deviations)


def _from(sequence: RankSequence, slot: int) -> RankSequence:
    skip = max(0, slot - sequence.first)
    if not skip:
        return sequence
    return RankSequence(sequence.rank, slot, sequence.records[skip:], sequence.keys[skip:])


def _vote(
    ranks_of: Mapping[tuple[int, ...], Sequence[int]],
) -> tuple[list[tuple[int, ...]], list[tuple[tuple[int, ...], bool]]]:
    """The lists that agree with each other, and those that differ, with whether they are outvoted.

    At the first slot where lists differ each rank that got there has a vote. Where two sets of
    ranks are the largest, that of the lowest rank stays, for want of a better one.
    """
    alive = sorted(ranks_of, key=lambda keys: ranks_of[keys][0])
    parted: list[tuple[tuple[int, ...], bool]] = []
    while alive:
        longest = max(alive, key=len)
        common = {keys: _common(keys, longest) for keys in alive}
        slot = min((each for keys, each in common.items() if each < len(keys)), default=None)
        if slot is None:
            return alive, parted
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
    return alive, parted


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of equal keys at the beginning of both."""
    end = min(len(one), len(other))
    at = 0
    while at < end and one[at : at + _STRIDE] == other[at : at + _STRIDE]:
        at += _STRIDE
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
