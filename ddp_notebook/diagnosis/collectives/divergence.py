"""Where ranks of a group diverge, and which kind of mistake that is: `classify`.

Surplus or missing records alone only say that two branches differ. The majority is right; of two
ranks, the one that continues its earlier pattern; otherwise the source code decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise

from ddp_notebook.diagnosis.collectives.alignment import (
    Alignment,
    Deviation,
    Difference,
    Edit,
    MissingBuckets,
    RankSequence,
    call_site,
    difference,
    first_conflict,
    first_fault,
    labels_are_shared,
    missing_buckets,
    moved,
)
from ddp_notebook.diagnosis.source_code.singled_out import singled_out
from ddp_notebook.diagnosis.source_code.sources import Sources
from ddp_notebook.model import Collective, Part, Ranks, name_ranks


@dataclass(frozen=True)
class Branch:
    """The ranks on one branch of a divergence, and their sequence; `at` is their position in it."""

    ranks: Ranks
    sequence: RankSequence
    at: int

    @property
    def named(self) -> str:
        """``rank 1``, ``ranks 0,2``."""
        return name_ranks(self.ranks)

    @property
    def here(self) -> Collective | None:
        """Their record at the divergence; None if their sequence has ended."""
        return self.sequence.at(self.at)

    @property
    def last(self) -> Collective | None:
        """Their last record before the divergence."""
        return self.sequence.at(self.at - 1)

    @property
    def key(self) -> int | None:
        """The key of `here`."""
        index = self.at - self.sequence.first
        return self.sequence.keys[index] if index < len(self.sequence.keys) else None

    @property
    def earlier_keys(self) -> tuple[int, ...]:
        """The keys of all their earlier records."""
        return self.sequence.keys[: self.at - self.sequence.first]

    @property
    def next_before(self) -> list[int | None]:
        """The keys of what followed, each earlier time that they had called the same as just now.

        The same is all of the latest calls of one line, with the call before these: layers of
        one shape come again and again in one turn of a loop, and what follows the last is not what
        follows the first.
        """
        keys, last = self.earlier_keys, 1
        records = self.sequence.records[: len(keys)]
        while last < len(keys) and call_site(records[-last]) == call_site(records[-1]):
            last += 1
        ends = range(last, len(keys))
        return [keys[end] for end in ends if keys[end - last : end] == keys[-last:]]

    def key_of(self, record: Collective) -> int:
        """The key of one of their records."""
        return self.sequence.keys[record.slot - self.sequence.first]

    def knows(self, record: Collective) -> bool:
        """True if they made the same call at the same lines, before or after."""
        return call_site(record) in self.sequence.call_sites

    def knew(self, record: Collective) -> bool:
        """True if they had called it before the divergence."""
        return self.sequence.call_sites.get(call_site(record), self.at) < self.at

    def repeats(self, record: Collective, since: Collective) -> bool:
        """True when they called `record` again and again, and `since` no more, up to here."""
        own, other, times = call_site(record), call_site(since), 0
        for index in range(min(self.at, self.sequence.end) - self.sequence.first - 1, -1, -1):
            earlier = call_site(self.sequence.records[index])
            if earlier == other:
                return False
            times += earlier == own
            if times > 1:
                return True
        return False


@dataclass(frozen=True)
class Divergence:
    """Ranks whose sequence differs from the others' at `fault`, the first edit that matters.

    `conflict` is the first collective in which both met and could not be one, if they did:
    that proves a mistake whatever its outcome. `moved` is true if the same collectives appear in
    another order.
    """

    alignment: Alignment
    deviation: Deviation
    fault: Edit
    conflict: tuple[int, Difference] | None
    moved: bool

    @property
    def own(self) -> Branch:
        """The branch that deviates."""
        return Branch(self.deviation.ranks, self.deviation.sequence, self.fault.own_at)

    @property
    def other(self) -> Branch:
        """The branch that it deviates from."""
        return Branch(self.deviation.others, self.deviation.reference, self.fault.other_at)

    @property
    def proven(self) -> bool:
        """True if unrelated values were combined."""
        if self.conflict is not None:
            return True
        records = (*self.fault.own, *self.fault.other)
        return self.moved and any(record.operation != "barrier" for record in records)

    @property
    def issued(self) -> tuple[int, int]:
        """When its first collective was issued, to sort by."""
        records = [*self.fault.own[:1], *self.fault.other[:1]]
        return min((record.issued_ns, record.number) for record in records)

    def culprits(self, otherwise: Branch | None) -> Ranks:
        """The outvoted ranks; without a majority those of `otherwise`, or everyone."""
        if self.deviation.sure:
            return self.deviation.ranks
        if otherwise is not None:
            return otherwise.ranks
        return tuple(sorted({*self.deviation.ranks, *self.deviation.others}))

    def goes_on(self, branch: Branch) -> bool:
        """False when what the branch has here never came next, and something else did before."""
        after = branch.next_before
        return not after or branch.key in after

    def against_habit(self) -> Branch | None:
        """The branch that deviates from what always came next until then, if there is one."""
        keys = self.own.earlier_keys
        if not keys:
            return None
        after: list[int | None] = [b for a, b in pairwise(keys) if a == keys[-1]]
        own, other = after.count(self.own.key), after.count(self.other.key)
        if own == other:
            return None
        return self.own if own < other else self.other


def divergences(alignment: Alignment) -> Iterator[Divergence]:
    """Every divergence of a group's ranks that is a fault, not merely another line of code."""
    for deviation in alignment.deviations:
        fault = first_fault(deviation)
        if fault is not None:
            # Ranks that have not reached the fault are on neither branch yet.
            sequences, at = alignment.sequences, fault.other_at
            far = tuple(rank for rank in deviation.others if sequences[rank].end > at)
            yield Divergence(
                alignment,
                replace(deviation, others=far or deviation.others),
                fault,
                first_conflict(deviation),
                moved(deviation, fault),
            )


# -- kinds -------------------------------------------------------------------------------


class Kind(Enum):
    """The kinds of mistakes that a divergence can be."""

    ANOTHER_ORDER = "the same collectives in another order"
    MISMATCH = "one collective with contents that do not match"
    SOME_BUCKETS = "a backward pass that reduced some of its buckets only"
    NO_BUCKETS = "a backward pass that one branch did not run, or did not reduce"
    ONE_BRANCH_ONLY = "a call that the other branch never makes"
    EITHER_OR = "calls in the two branches of one `if`"
    PAST_THE_LOOP = "a loop that one branch has left"
    ANOTHER_WAY = "another way through a loop"
    OTHER_OBJECTS = "a loop over other objects, or over the same in another order"
    MORE_OFTEN = "a call that one branch makes more often"
    TRIED_AGAIN = "a call that one branch made again after an error"


@dataclass(frozen=True)
class Classified:
    """A classified divergence: the culprits, and the collectives that show the mistake.

    `full` is the branch that has `records`, which `short` lacks; `there` is what `short` has
    instead, None where it has ended. `sides` are both as the divergence has them.
    """

    kind: Kind
    culprits: Ranks
    full: Branch
    short: Branch
    sides: tuple[Branch, Branch]
    records: tuple[Collective, ...] = ()
    there: Collective | None = None
    missing: MissingBuckets | None = None
    difference: Difference | None = None

    @property
    def record(self) -> Collective:
        """The first of `records`."""
        return self.records[0]

    @property
    def shown(self) -> tuple[tuple[Branch, Collective | None], ...]:
        """Both branches, each with the record that shows the mistake; None for nothing more.

        A call that one branch lacks need not be the first record in which they differ.
        """
        if self.kind in (Kind.MISMATCH, Kind.ONE_BRANCH_ONLY, Kind.SOME_BUCKETS):
            return (self.full, self.record), (self.short, self.there)
        return tuple((branch, branch.here) for branch in self.sides)


def classify(divergence: Divergence, sources: Sources) -> Classified | None:
    """The kind of mistake; None if both branches may have matched."""
    found = _classify(divergence, sources)
    if found is None:
        return None
    full, short, here = found.full, found.short, found.short.here
    if found.kind is Kind.NO_BUCKETS:
        # A branch that ran no backward may, after an error, have begun the whole training again.
        if here and short.knew(here) and sources.tries_again(here) is not None:
            return replace(
                found,
                kind=Kind.TRIED_AGAIN,
                culprits=short.ranks,
                full=short,
                short=full,
                records=(here,),
            )
        return found
    right = divergence.deviation.sure and full.ranks != divergence.deviation.ranks
    if found.kind not in (Kind.PAST_THE_LOOP, Kind.MORE_OFTEN) or right:
        return found
    if sources.tries_again(found.record) is None:
        return found
    return replace(found, kind=Kind.TRIED_AGAIN, culprits=full.ranks)


def _classify(divergence: Divergence, sources: Sources) -> Classified | None:
    # From what records prove to what only the code can tell. (1) The same calls in another order.
    # (2) One line, with other names on both sides. (3) One branch has calls that the other lacks:
    # an insertion, so the rest is in step, shifted. (4) Both meant to meet: one call, with other
    # contents. (5) Both have something else there: which of them left the common way is open, and
    # is told by what each did before, and by the tests and loops around the two lines.
    fault = divergence.fault
    if divergence.moved:
        return _another_order(divergence)
    renamed = _renamed(divergence)
    if renamed is not None:
        return _left_a_name_out(divergence) or _mismatch(
            divergence, sources, renamed[:1], renamed[1:]
        )
    if not fault.own or not fault.other:
        return _one_sided(divergence)
    if _meant_to_meet(divergence, sources):
        return _mismatch(divergence, sources, fault.own, fault.other)
    return _crossed(divergence, sources)


def _another_order(divergence: Divergence) -> Classified:
    # The first edit may have nothing on one side: what it lacks there it called earlier or later.
    fault, sides = divergence.fault, (divergence.own, divergence.other)
    full, short = sides if fault.own else sides[::-1]
    records, culprits = fault.own or fault.other, divergence.culprits(None)
    return Classified(Kind.ANOTHER_ORDER, culprits, full, short, sides, records)


# -- both branches meant the same collective ---------------------------------------------


def _renamed(divergence: Divergence) -> tuple[Collective, Collective] | None:
    """Both branches' records at the fault, if they are the same call with different labels."""
    own, other = divergence.own.here, divergence.other.here
    if own is None or other is None or not divergence.fault.in_step:
        return None
    if not (own.label and other.label) or own.label == other.label:
        return None  # a different label may have a different shape: the label decides
    if call_site(own) != call_site(other) or own.operation == "barrier":
        return None
    return (own, other) if labels_are_shared(divergence.deviation, own) else None


def _left_a_name_out(divergence: Divergence) -> Classified | None:
    """One branch is at a name that it has had, and not at the one that always came next on it.

    There the other branch is: no other order of names, but a turn of the loop left out.
    """
    own, other = divergence.own, divergence.other
    astray = divergence.against_habit()
    if astray is None or (divergence.deviation.sure and astray != own):
        return None
    mine, theirs = (own, other) if astray == own else (other, own)
    keys, record, there = mine.earlier_keys, mine.here, theirs.here
    usual = {b for a, b in pairwise(keys) if a == keys[-1]}
    if usual != {theirs.key} or mine.key not in keys or record is None or there is None:
        return None
    culprits = divergence.culprits(mine)
    return Classified(Kind.ANOTHER_WAY, culprits, mine, theirs, (mine, theirs), (record,), there)


def _meant_to_meet(divergence: Divergence, sources: Sources) -> bool:
    """True when both branches are at the same call, and only what they bring differs."""
    own, other = divergence.fault.own[0], divergence.fault.other[0]
    if own.path == other.path and own.path:
        if difference(own, other) is Difference.LABEL:
            return True
        # In a loop one line may bring several shapes: then it is a matter of which comes next.
        earlier = {*divergence.own.earlier_keys, *divergence.other.earlier_keys}
        keys = (divergence.own.key_of(own), divergence.other.key_of(other))
        return not earlier.issuperset(keys)
    if own.operation != other.operation or own.operation == "barrier":
        return False
    # A branch that makes the other's call as well, at another time, is elsewhere in one program: to
    # compare its shape with the other's would blame a tensor for a step that was left out. Two
    # lines are one call only as the two arms of an `if`.
    if divergence.own.knows(other) or divergence.other.knows(own):
        return False
    known = sources.knows(own) and sources.knows(other)
    return sources.alternatives(own, other) if known else True


def _mismatch(
    divergence: Divergence,
    sources: Sources,
    own: tuple[Collective, ...],
    other: tuple[Collective, ...],
) -> Classified | None:
    """The first of these pairs that cannot be one collective."""
    ranks, others = divergence.deviation.ranks, divergence.deviation.others
    for a, b in zip(own, other, strict=False):
        what = difference(a, b)
        if what is None:
            continue
        # One line with two names: another thing may well have another shape.
        names = bool(a.label and b.label) and a.label != b.label and call_site(a) == call_site(b)
        named = names and what is not Difference.GROUP  # a group's name is no tensor's
        if named and (labels_are_shared(divergence.deviation, a) or sources.spells(a, b)):
            what = Difference.LABEL
        # Without a majority: data has any size, and a last batch is shorter than all before it,
        # which does not make it the wrong one. So both are, but for a rank that the code gives its
        # own tensor. Else who brings what it always brought is right. Then the root of a broadcast,
        # since the others must take what it sends. What is left is a convention and no proof: rank
        # 0 is taken to be right, as the one that most programs treat as the example.
        usual = _usual(divergence.own, a)
        if divergence.deviation.sure:
            culprits = ranks
        elif what is Difference.SHAPE:
            culprits = divergence.culprits(None)
            text = " ".join(record.place.text for record in (a, b) if record.place is not None)
            culprits = singled_out(sources, re.findall(r"[^\W\d]\w*", text), culprits) or culprits
        elif usual != _usual(divergence.other, b):
            culprits = others if usual else ranks
        elif a.root == b.root and a.root in (*ranks, *others):
            culprits = others if a.root in ranks else ranks
        else:
            culprits = max(ranks, others, key=min)
        sides = divergence.own, divergence.other
        return Classified(
            Kind.MISMATCH, culprits, *sides, sides, records=(a,), there=b, difference=what
        )
    return None


def _usual(branch: Branch, record: Collective) -> bool:
    """True when these ranks have had the same in an earlier collective."""
    index = record.slot - branch.sequence.first
    return index > 0 and branch.sequence.keys[index] in branch.sequence.keys[:index]


# -- one branch has collectives that the other lacks -------------------------------------


def _one_sided(divergence: Divergence) -> Classified:
    """One branch lacks collectives, and both continue, or are at their end."""
    fault, sides = divergence.fault, (divergence.own, divergence.other)
    full, short = sides if fault.own else sides[::-1]
    records = fault.own or fault.other
    # Buckets first: a backward that reduced less looks like any call that was left out, and "call
    # it on every rank" would be no help. Then what the shorter branch never calls at all. What both
    # call, and one of them more often, is a loop: it was left earlier, or went round once more.
    buckets = _buckets(divergence, full, short, records)
    if buckets is not None:
        return buckets
    new = next((record for record in records if not short.knows(record)), None)
    if new is not None:
        return _one_branch_only(divergence, full, short, new, short.here)
    # A whole turn of a loop is left out where the same lines were called just before.
    index = full.at - full.sequence.first
    before = full.sequence.records[max(0, index - len(records)) : index]
    turn = [*map(call_site, before)] == [*map(call_site, records)] and divergence.goes_on(full)
    there, record = short.here, records[0]
    if there is not None and turn and full.repeats(record, since=there):
        return _past_the_loop(divergence, short, full, record)
    culprits = divergence.culprits(divergence.against_habit())
    return Classified(Kind.MORE_OFTEN, culprits, full, short, sides, records)


def _one_branch_only(
    divergence: Divergence,
    full: Branch,
    short: Branch,
    record: Collective,
    there: Collective | None,
) -> Classified:
    sides = divergence.own, divergence.other
    culprits = divergence.culprits(full)
    return Classified(Kind.ONE_BRANCH_ONLY, culprits, full, short, sides, (record,), there)


def _past_the_loop(
    divergence: Divergence, past: Branch, inside: Branch, record: Collective
) -> Classified:
    """`past` is past the loop in which `inside` still calls `record`."""
    sides = divergence.own, divergence.other
    culprits = divergence.culprits(past)
    return Classified(Kind.PAST_THE_LOOP, culprits, inside, past, sides, (record,), past.here)


def _buckets(
    divergence: Divergence,
    full: Branch,
    short: Branch,
    records: tuple[Collective, ...],
    passed: bool = True,
) -> Classified | None:
    """A backward pass of DDP in which one branch reduced less; None in any other case.

    `passed` is false of a branch that may still be before the pass: then only a pass that it
    has begun counts.
    """
    missing = missing_from(full, short, records)
    if missing is None or (missing is not MissingBuckets.SOME and not passed):
        return None
    if divergence.deviation.sure and short.ranks != divergence.deviation.ranks:
        return None  # if the majority reduces less, the others reduce too much
    kind = Kind.NO_BUCKETS
    if missing is MissingBuckets.SOME:
        kind = Kind.SOME_BUCKETS
    elif missing is MissingBuckets.ALL and short.knows(records[0]):
        return None  # a step left out, or one less: other kinds tell loops apart
    sides = divergence.own, divergence.other
    return Classified(kind, short.ranks, full, short, sides, records, short.here, missing)


def missing_from(
    full: Branch, short: Branch, records: tuple[Collective, ...] = ()
) -> MissingBuckets | None:
    """Return which buckets of a backward pass the short branch lacks, from its end or the fault.

    `records` are those that the full branch has more, all to its end by default.
    """
    ahead = records or full.sequence.records[full.at - full.sequence.first :]
    return missing_buckets(full.sequence, full.at, short.sequence, short.at, ahead)


# -- both branches have something else ---------------------------------------------------


def _crossed(divergence: Divergence, sources: Sources) -> Classified:
    own, other = divergence.fault.own[0], divergence.fault.other[0]
    mine, theirs = sides = divergence.own, divergence.other
    if sources.swapped(own, other):
        return _another_order(divergence)
    new_to_other, new_to_own = not theirs.knew(own), not mine.knew(other)
    left_out = _left_out(sources, own, other)
    buckets = _buckets(
        divergence, theirs, mine, divergence.fault.other, left_out is other or not new_to_other
    ) or _buckets(divergence, mine, theirs, divergence.fault.own, left_out is own or not new_to_own)
    if buckets is not None:
        return buckets
    by_habit = divergence.culprits(divergence.against_habit())
    # Both have called both before: one is past the loop, or took another way through it.
    if not new_to_other and not new_to_own:
        if divergence.goes_on(theirs) and theirs.repeats(other, since=own):
            return _past_the_loop(divergence, mine, theirs, other)
        if divergence.goes_on(mine) and mine.repeats(own, since=other):
            return _past_the_loop(divergence, theirs, mine, own)
        return Classified(Kind.ANOTHER_WAY, by_habit, mine, theirs, sides, (own,), other)
    # Not a call that only one branch makes: it is part of a step that the other branch has not.
    for past, inside, record in ((theirs, mine, own), (mine, theirs, other)):
        behind = past.here is not None and is_rebuild(inside, record)
        if behind and past.here and _behind_the_loop(sources, past.here, record, inside.last):
            return _past_the_loop(divergence, past, inside, record)
    if sources.call_of_both(own, other) is not None:
        return Classified(Kind.OTHER_OBJECTS, by_habit, mine, theirs, sides, (own,), other)
    if new_to_other and new_to_own:
        if sources.alternatives(own, other):
            both = divergence.culprits(None)
            return Classified(Kind.EITHER_OR, both, mine, theirs, sides, (own,), other)
        if left_out is own:
            return _one_branch_only(divergence, mine, theirs, own, other)
        return _one_branch_only(divergence, theirs, mine, other, own)
    full, short, record, there = (
        (mine, theirs, own, other) if new_to_other else (theirs, mine, other, own)
    )
    if _behind_the_loop(sources, record, there, full.last):
        return _past_the_loop(divergence, full, short, there)
    return _one_branch_only(divergence, full, short, record, there)


def is_rebuild(branch: Branch, record: Collective) -> bool:
    """True of the broadcast with which DDP's reducer sets its buckets again, in its second step.

    It is of integers, and no forward before had it. So it is no call of its own that a branch makes
    and the other leaves out: it only shows that the branch is in one step more.
    """
    what = record.part, record.operation, record.dtype
    if what != (Part.FORWARD, "broadcast", "int32") or branch.knew(record):
        return False
    earlier = branch.sequence.records[: branch.at - branch.sequence.first]
    return any(other.part is Part.BACKWARD for other in earlier)


def _behind_the_loop(
    sources: Sources, record: Collective, there: Collective, last: Collective | None
) -> bool:
    """True if `record` follows the loop of `there`, and is not conditional on the rank.

    Not where all ranks had left that loop, as `last`, which all have called, shows: then those at
    `there` have passed the place of `record` without calling it, and are in the loop again.
    """
    # A test of the rank on the way to one of the two lines says more than the loop does: then the
    # branch is not past anything, it was sent elsewhere. A test that both lines stand behind does
    # not tell them apart.
    if sources.in_one_loop(record, there) is not False:
        return False
    if last is not None and sources.stands_behind(last, there):
        return False
    condition, other = sources.condition(record), sources.condition(there)
    return condition is None or not condition.on_rank or condition == other


def _left_out(sources: Sources, own: Collective, other: Collective) -> Collective:
    """Which of two calls the other branch left out: the conditional one, else the earlier line.

    A rank at the later line has passed the earlier one without calling it.
    """
    conditions = [sources.condition(record) for record in (own, other)]
    on_rank = [condition is not None and condition.on_rank for condition in conditions]
    if on_rank[0] != on_rank[1]:
        return own if on_rank[0] else other
    for a, b in zip(own.path, other.path, strict=False):
        if (a.file, a.line) != (b.file, b.line):
            return other if a.file == b.file and b.line < a.line else own
    return own
