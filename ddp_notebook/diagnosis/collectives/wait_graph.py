"""The wait-for graph of the ranks, and which of them are stuck.

A rank in a collective needs every member that has not issued it; a send needs its recv. So a
rank makes progress only when all that it waits for can arrive: one that is gone blocks it for
ever, however busy the rest is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from ddp_notebook.diagnosis.progress import in_setup, opens_store, works
from ddp_notebook.diagnosis.setup import torch_errors
from ddp_notebook.model import (
    DEFAULT_GROUP,
    Activity,
    Case,
    Collective,
    Collectives,
    Phase,
    RankReport,
    Ranks,
)

_MAY_COME = (Activity.HELD, Activity.SILENT)
"""Nothing proves of such a rank that it will not call what the others wait in."""


@dataclass(frozen=True)
class WaitGraph:
    """`waits` has for each rank that waits those it waits for; `at` the record it waits in.

    A rank that aborted its wait (connection closed, timeout) counts as waiting, because it will not
    arrive either. A rank in setup is in neither.
    """

    waits: Mapping[int, Ranks]
    at: Mapping[int, Collective]
    may_come: frozenset[int]
    """Ranks that can still make progress: those that run, and those that only wait for such."""

    @cached_property
    def stuck(self) -> Ranks:
        """The ranks whose waiting cannot end by itself."""
        return tuple(sorted(rank for rank in self.waits if rank not in self.may_come))

    @cached_property
    def cycles(self) -> tuple[Ranks, ...]:
        """Sets of ranks each of which waits for every other, maybe through others."""
        # A knot is what a rank reaches and what reaches it: a strongly connected component. Ranks
        # that only wait for a knot are victims of it, and in none. `reach` is kept by what is
        # waited for: most ranks wait for the very same ones, and 10,000 ranks cost a few walks.
        found = []
        left = set(self.stuck)
        waited_by: dict[int, list[int]] = {}
        for rank, others in self.waits.items():
            for other in others:
                waited_by.setdefault(other, []).append(rank)
        while left:
            rank = min(left)
            knot = self.reach(rank) & _reach(waited_by, rank)
            left -= knot | {rank}
            if knot:
                found.append(tuple(sorted(knot)))
        return tuple(found)

    def reach(self, rank: int) -> frozenset[int]:
        """Every rank that `rank` waits for, also through others."""
        others = self.waits.get(rank, ())
        if others not in self._reached:  # many ranks wait for the same ones
            self._reached[others] = _reach(self.waits, rank)
        return self._reached[others]

    @cached_property
    def _reached(self) -> dict[Ranks, frozenset[int]]:
        return {}


def _reach(edges: Mapping[int, Collection[int]], rank: int) -> frozenset[int]:
    """Every rank that edges lead to from `rank`."""
    found: set[int] = set()
    ahead = [rank]
    while ahead:
        new = set(edges.get(ahead.pop(), ())) - found
        found |= new
        ahead.extend(new)
    return frozenset(found)


def wait_graph(case: Case) -> WaitGraph:
    """The graph of this moment."""
    arrivals = _Arrivals(case)
    waits: dict[int, Ranks] = {}
    at: dict[int, Collective] = {}
    any_will_do: set[int] = set()
    for_nobody: set[int] = set()
    for e in case.ranks:
        if in_setup(e):
            if in_new_group(e):
                waits[e.rank] = arrivals.not_in_new_group(e.rank)
            continue
        if waits_for_key(e):
            waits[e.rank] = tuple(other.rank for other in case.ranks if other is not e)
            any_will_do.add(e.rank)
            continue
        record = _record_of(e, arrivals)
        if record is not None:
            at[e.rank] = record
            waits[e.rank] = arrivals.missing(record)
            if record.is_point_to_point and record.peer is None:
                any_will_do.add(e.rank)
            if addresses_nobody(case, record):
                for_nobody.add(e.rank)
    waits |= _queued_on_gpus(case, at)
    # Which ranks may still come: those that run, and, again and again, those that wait for such
    # ranks only. The greatest set would be wrong: ranks that wait for each other in a ring would
    # keep each other in it. So this is the least one that is closed: it begins with ranks that run
    # by themselves, and a rank that waits joins it once all that it waits for are in it (or one of
    # them, where any will do). Whoever is left out can make no progress, whatever time passes.
    # In doubt a rank is taken to run: "stuck" ends a run and must be proof. That is why one that
    # does not answer counts as running unless the system says that it is stopped.
    known = {e.rank for e in case.ranks}
    coming = {
        e.rank
        for e in case.ranks
        if (works(e) or e.activity in _MAY_COME) and e.process.state != "stopped"
    }
    if coming:  # one of them may write the file that others wait for in a loop
        coming |= {e.rank for e in case.ranks if e.awaits.file}
    coming.update(rank for rank in case.waiting if rank not in waits)  # setup, or unknown
    waiting = (set(case.waiting) & waits.keys()) - for_nobody
    while True:
        freed = {
            rank
            for rank in waiting
            if coming.issuperset(set(waits[rank]) & known)
            or (rank in any_will_do and not coming.isdisjoint(waits[rank]))
        }
        if not freed:
            return WaitGraph(waits, at, frozenset(coming))
        coming |= freed
        waiting -= freed


def _queued_on_gpus(case: Case, at: Mapping[int, Collective]) -> dict[int, Ranks]:
    """Return the ranks in a message whose peer has issued its part, behind what it waits in."""
    # A GPU goes through sends and receives in their order, though all have returned at once: two
    # ranks that each send first wait for each other, whatever they have issued behind that. Not so
    # what was issued with async_op or as a batch.
    on_gpu = {e.rank for e in case.ranks if e.awaits.gpu}
    in_order = {rank: r for rank, r in at.items() if r.api in ("send", "recv")}
    queued: dict[int, Ranks] = {}
    for rank, record in in_order.items():
        theirs = counterpart(case.collectives, record) if record.peer in on_gpu else None
        before = in_order.get(theirs.rank) if theirs is not None else None
        if theirs is not None and before is not None and before.number < theirs.number:
            queued[rank] = (theirs.rank,)
    return queued


def addresses_nobody(case: Case, record: Collective) -> bool:
    """True of a send to, or a recv from, a rank that is not in the group.

    Only where all members are known: of a job on several hosts some ranks may not be seen here.
    """
    known: Collection[int] | None = case.collectives.groups.get(record.group)
    if known is None and record.group == DEFAULT_GROUP:
        known = range(max((e.arguments.world_size or 0 for e in case.ranks), default=0))
    return bool(known) and record.peer is not None and record.peer not in (known or ())


def in_new_group(evidence: RankReport) -> bool:
    """True of a rank that waits in setup though its group is complete: for a further group.

    Every rank of the job must call `new_group`, members or not.
    """
    complete = evidence.initialized and evidence.left == evidence.entered
    return complete and in_setup(evidence) and not opens_store(evidence)


def missing(case: Case, record: Collective) -> Ranks:
    """The ranks that never called `record`: absent, or at another collective in its place."""
    # A call that failed on a rank was made there all the same: asked is who never came, and not, as
    # in the graph, who may still take part.
    return _Arrivals(case, left=()).missing(record)


def waits_for_key(evidence: RankReport) -> bool:
    """True of a rank that waits until some rank sets a key of a store."""
    return evidence.activity is Activity.WAITING and bool(evidence.awaits.key)


def _record_of(evidence: RankReport, arrivals: _Arrivals) -> Collective | None:
    """The record in which a rank's main thread waits, or waited until torch gave up on it.

    Of several works that are not done, where the rank cannot tell which one it waits for: the
    first that cannot be done, since not all that it needs have come.
    """
    # With async_op=True, and in DDP's backward, several works of a rank are open at once, and the
    # one that was issued last need not be the one in which the main thread waits. The rank knows
    # it from its stack, mostly; else the first that lacks somebody is what holds the others up,
    # since works of one group are done in order.
    records = arrivals.collectives.of.get(evidence.rank, ())
    if not records:
        return None
    if evidence.activity is Activity.WAITING:
        if evidence.waits_for is not None:
            number = evidence.waits_for
            return next((record for record in reversed(records) if record.number == number), None)
        pending = [record for record in records if not record.over]
        held_up = (record for record in pending if arrivals.missing(record))
        return next(held_up, pending[0] if pending else None)
    if not gave_up(evidence):
        return None
    last = records[-1]
    if last.phase in (Phase.ISSUED, Phase.FAILED):
        return last
    # It waited for one of several messages, and others came after that were sent.
    open_ = [record for record in records if record.is_point_to_point and not record.over]
    return next((record for record in open_ if arrivals.missing(record)), None)


def gave_up(evidence: RankReport) -> bool:
    """True if a rank's error only says that others did not arrive or went away."""
    return evidence.activity is Activity.FAILED and torch_errors.is_victim(evidence)


class _Arrivals:
    """Which ranks have arrived, by slot; looked up for the few records in which ranks wait."""

    def __init__(self, case: Case, left: tuple[Phase, ...] = (Phase.FAILED,)) -> None:
        """`left` are phases of ranks that called it and take no part in it any more."""
        self._case = case
        self.collectives = case.collectives
        self._not_there = (Phase.HELD, Phase.REFUSED, *left)
        self._absent: dict[tuple[str, int, str], Ranks] = {}

    def not_in_new_group(self, rank: int) -> Ranks:
        return tuple(e.rank for e in self._case.ranks if e.rank != rank and not in_new_group(e))

    def missing(self, record: Collective) -> Ranks:
        """The ranks without which `record` cannot be done: absent, or at something else."""
        if record.is_point_to_point:
            if record.peer is not None:
                return () if counterpart(self._case.collectives, record) else (record.peer,)
            if unmatched_senders(self._case.collectives, record):  # a recv from any rank
                return ()
            return tuple(r for r in members(self._case, record.group) if r != record.rank)
        key = record.group, record.slot, record.operation
        if key not in self._absent:  # most ranks wait in the same one
            all_ = members(self._case, record.group)
            self._absent[key] = tuple(rank for rank in all_ if not self._came(rank, record))
        absent = self._absent[key]
        return tuple(r for r in absent if r != record.rank) if record.rank in absent else absent

    def _came(self, rank: int, record: Collective) -> bool:
        theirs = at_slot(self._case.collectives, rank, record)
        if theirs is None:  # never there, or older than the records
            last = next(_latest(self._case.collectives, rank, record.group), None)
            return last is not None and last.slot > record.slot
        issued = theirs.phase not in self._not_there
        return issued and theirs.operation == record.operation


def members(case: Case, group: str) -> Ranks:
    """The members of a group; of one whose members are not known, the ranks that used it."""
    known = case.collectives.groups.get(group)
    if known is not None:
        return known
    if group == DEFAULT_GROUP:
        return tuple(e.rank for e in case.ranks)
    used = (rank for rank, rs in case.collectives.of.items() if any(c.group == group for c in rs))
    return tuple(sorted(used))


def at_slot(collectives: Collectives, rank: int, record: Collective) -> Collective | None:
    """Return the collective of `rank` in the slot and group of `record`."""
    for other in _latest(collectives, rank, record.group):
        if other.slot <= record.slot:
            return other if other.slot == record.slot else None
    return None


def all_at_slot(collectives: Collectives, record: Collective) -> dict[int, Collective]:
    """Return the collectives in the slot and group of `record`, by the ranks that have one."""
    there = ((rank, at_slot(collectives, rank, record)) for rank in sorted(collectives.of))
    return {rank: other for rank, other in there if other is not None}


def _latest(collectives: Collectives, rank: int, group: str) -> Iterator[Collective]:
    """A rank's collectives of a group, the latest first."""
    for record in reversed(collectives.of.get(rank, ())):
        if record.group == group and not record.is_point_to_point:
            yield record


# -- sends and receives ------------------------------------------------------------------


def counterpart(collectives: Collectives, record: Collective) -> Collective | None:
    """The recv of a send, or the send of a recv: the one of equal number between both ranks.

    Messages with one tag from one rank to another arrive in the order in which they were sent.
    """
    # torch numbers sends and receives of a pair of ranks by tag, not by group slot, and messages do
    # not overtake each other. So the n-th send of one meets the n-th recv of the other. Where old
    # records were dropped on either side n is not known, and only open ones can be matched.
    peer = record.peer
    if peer is None:
        return None
    mine = between(collectives, record.rank, record.operation, peer, record)
    theirs = between(collectives, peer, _OPPOSITE[record.operation], record.rank, record)
    dropped = collectives.first.get(record.rank) or collectives.first.get(peer)
    if dropped:  # what is counted from the end is known, not what is counted from the front
        return next(
            (other for other in theirs if not other.over or other.slot == record.slot), None
        )
    index = next((i for i, other in enumerate(mine) if other.number == record.number), len(theirs))
    return theirs[index] if index < len(theirs) else None


_OPPOSITE = {"send": "recv", "recv": "send"}


def between(
    collectives: Collectives, rank: int, operation: str, peer: int, like: Collective
) -> list[Collective]:
    """Return the messages of `rank` to or from `peer` with the tag and group of `like`."""
    return [
        record
        for record in collectives.of.get(rank, ())
        if record.operation == operation
        and record.group == like.group
        and record.tag == like.tag
        and record.phase not in (Phase.HELD, Phase.REFUSED)
        and (record.peer == peer or (record.peer is None and operation == "recv"))
    ]


def pairs(collectives: Collectives) -> Iterator[tuple[Collective, Collective]]:
    """Each send with its recv, of ranks none of whose records were dropped.

    None of those among which one has received from a rank that is not known.
    """
    sent: dict[tuple[object, ...], list[Collective]] = {}
    received: dict[tuple[object, ...], list[Collective]] = {}
    from_anybody: set[tuple[object, ...]] = set()
    for rank, records in collectives.of.items():
        if collectives.first.get(rank):
            continue
        for record in records:
            if record.operation == "send":
                sent.setdefault((record.group, rank, record.peer, record.tag), []).append(record)
            elif record.operation == "recv":
                received.setdefault((record.group, record.peer, rank, record.tag), []).append(
                    record
                )
                if record.peer is None:
                    from_anybody.add((record.group, rank, record.tag))
    for key, sends in sent.items():
        group, _, receiver, tag = key
        if (group, receiver, tag) not in from_anybody:
            yield from zip(sends, received.get(key, ()), strict=False)


def unmatched_senders(collectives: Collectives, record: Collective) -> Ranks:
    """The ranks that have sent this rank more, with the tag of `record`, than it has received."""
    found, receiver = [], record.rank
    for sender in sorted(collectives.of.keys() - {receiver}):
        sent = between(collectives, sender, "send", receiver, record)
        if collectives.first.get(sender) or collectives.first.get(receiver):
            # With old records dropped on either side counts say nothing. But a send that is not
            # over yet has not been received, however many came before.
            more = any(not message.over for message in sent)
        else:
            received = between(collectives, receiver, "recv", sender, record)
            more = len(sent) > sum(message.peer is not None for message in received)
        if more:
            found.append(sender)
    return tuple(found)
