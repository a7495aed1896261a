"""Ranks that stand still, by their stacks alone: who is where, and which code leads apart.

A stack shows the one collective in which a rank waits, not those before. So ranks at one line may
be in different turns of a loop, and say nothing. Ranks that all wait in the default group, at
different lines, wait forever: each needs the others. Who went wrong follows from the code alone,
and only where it leaves no choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ddp_notebook.diagnosis import catalogue
from ddp_notebook.diagnosis.collectives.alignment import call_site
from ddp_notebook.diagnosis.collectives.describe import called, named, side
from ddp_notebook.diagnosis.collectives.groups import other_groups
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.diagnose import diagnose_setup
from ddp_notebook.diagnosis.progress import doing, in_setup, where_busy, works
from ddp_notebook.diagnosis.source_code.names import Varies
from ddp_notebook.diagnosis.source_code.sources import Condition, Sources
from ddp_notebook.model import (
    DEFAULT_GROUP,
    Case,
    Collective,
    Diagnosis,
    Finding,
    Part,
    Ranks,
    Side,
    by_value,
)

WAIT = frozenset(
    [
        "all_reduce",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_object",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
        "scatter_object_list",
        "new_group",
        "monitored_barrier",
    ]
)
"""Functions of torch that all ranks of a group must call."""


@dataclass(frozen=True, slots=True)
class _Site:
    """The ranks that wait at one call, and the record of one of them."""

    ranks: Ranks
    record: Collective

    @property
    def of_all(self) -> bool:
        """True of a collective that needs every rank."""
        return self.record.group == DEFAULT_GROUP and not self.record.is_point_to_point


def diagnose_standing(case: Case) -> Diagnosis:
    """Diagnose a job whose ranks were seen to stand still, each at most in one record.

    A rank with exit code 0 has ended. Nothing is said of a rank that may go on by itself.
    """
    joining = any(in_setup(report) and not report.initialized for report in case.ranks)
    if joining and not any(report.end.code == 0 for report in case.ranks):
        diagnosis = diagnose_setup(case)
    else:
        findings = _never_joined(case) if joining else apart(case)
        diagnosis = Diagnosis(tuple(findings), world_size=case.world_size)
    return replace(
        diagnosis, doing={report.rank: doing(report) for report in case.ranks}, unsure=""
    )


def _never_joined(case: Case) -> Iterator[Finding]:
    """Ranks that ended, while the others wait for them to make the first group."""
    ended = tuple(report.rank for report in case.ranks if report.end.code == 0)
    waiting = tuple(report for report in case.ranks if in_setup(report))
    sizes = {report.arguments.world_size for report in waiting}
    if len(waiting) + len(ended) == case.world_size and sizes <= {case.world_size, None}:
        yield catalogue.finding(
            "missing-rank.ended", ended, waiting=tuple(report.rank for report in waiting)
        )


def apart(case: Case) -> Iterator[Finding]:
    """Find why ranks wait in different calls, or have ended; each has at most one record."""
    context = Context(case, Sources(case.sources, case.files_seen))
    at = {rank: records[-1] for rank, records in case.collectives.of.items() if records}
    ended = tuple(report.rank for report in case.ranks if report.end.code == 0)
    if any(map(works, case.ranks)):
        yield from _late(context, at)
    elif any(report.groups_made for report in case.ranks):
        yield from other_groups(context)
    elif at and at.keys() | set(ended) == context.reports.keys():
        rings = list(_rings(at))
        apart_ = _ended_before(context, at, ended) if ended else _parted(context, at)
        yield from rings or apart_


def _late(context: Context, at: Mapping[int, Collective]) -> Iterator[Finding]:
    """Ranks that work while others wait in collectives: no mistake."""
    late = tuple(report.rank for report in context.case.ranks if works(report))
    if not at or any(record.group != DEFAULT_GROUP for record in at.values()):
        return
    waiting = tuple(sorted(at))
    yield catalogue.finding(
        "straggler.busy-elsewhere",
        late,
        waiting=waiting,
        evidence=tuple(f"rank {rank}: busy{where_busy(context.reports[rank])}" for rank in late),
        passing=True,
        calls=tuple(dict.fromkeys(called(record) for _, record in sorted(at.items()))),
    )


def _rings(at: Mapping[int, Collective]) -> Iterator[Finding]:
    """Ranks all of which send, or all of which receive, each waiting for the next one."""
    for start in at:
        ring = _ring_from(start, at)
        records = [at[rank] for rank in ring]
        same = len({(record.operation, record.group) for record in records}) == 1
        if len(ring) > 1 and same and records[0].group == DEFAULT_GROUP:
            ranks = tuple(sorted(ring))
            yield catalogue.finding(
                "p2p-mismatch.all-send"
                if records[0].operation == "send"
                else "p2p-mismatch.all-receive",
                ranks,
                waiting=ranks,
                evidence=tuple(f"rank {record.rank}: {named(record)}" for record in records),
            )


def _ring_from(start: int, at: Mapping[int, Collective]) -> list[int]:
    """The ranks that wait for each other in sends and receives, from the lowest, which is `start`.

    None where it is not the lowest of a ring.
    """
    ring: list[int] = []
    record = at.get(start)
    while record is not None and record.is_point_to_point and record.rank not in ring:
        ring.append(record.rank)
        record = at.get(-1 if record.peer is None else record.peer)
    return ring if ring and record is at[start] and start == min(ring) else []


def _sites(at: Mapping[int, Collective]) -> list[_Site]:
    """The calls at which ranks wait, that with the fewest ranks first."""
    same = by_value({rank: (call_site(record), record.part) for rank, record in at.items()})
    sites = [_Site(ranks, at[ranks[0]]) for ranks, _ in same]
    return sorted(sites, key=lambda site: len(site.ranks))


def _parted(context: Context, at: Mapping[int, Collective]) -> Iterator[Finding]:
    """All ranks wait, at two calls that cannot meet, of which one at least is in the group of all.

    So each side needs the other, which does not come.
    """
    # A stack has no history: two calls in one loop may be a turn apart and about to meet. So only
    # calls that cannot meet count, both of them waited for, and one at least needs every rank.
    sites = _sites(at)
    if len(sites) != 2 or not all(context.sources.knows(site.record) for site in sites):
        return
    few, most = sites
    one, other = _by_rank(context.sources, few, most), _by_rank(context.sources, most, few)
    if one is None and other is None:
        yield from (*_past(context, few, most), *_past(context, most, few))
    elif other is None and one is not None:
        yield from _alone_at(context, few, one, most)
    elif one is None and other is not None:
        yield from _alone_at(context, most, other, few)


def _alone_at(context: Context, own: _Site, test: Condition, other: _Site) -> Iterator[Finding]:
    """Where it is certain that the others do not come to the call, or to one that meets it."""
    sure = own.of_all or test.decides is Varies.JUST_SO
    if other.of_all and sure and not context.sources.answered(own.record, test):
        yield _alone(context, own, test, side(other.ranks, other.record), called(other.record))


def _by_rank(sources: Sources, own: _Site, other: _Site) -> Condition | None:
    """The test of the rank that lets just these ranks come to the call."""
    condition = sources.condition(own.record, other.record, own.ranks, other.ranks)
    return condition if condition is not None and condition.decides >= Varies.BY_RANK else None


def _alone(
    context: Context, own: _Site, test: Condition, there: Side, elsewhere: str = ""
) -> Finding:
    """A call that a test of the rank has some ranks make alone; the others are `elsewhere`."""
    return catalogue.finding(
        "conditional-collective.only-some" if elsewhere else "conditional-collective.others-ended",
        own.ranks,
        waiting=context.victims,
        evidence=(f"{test.place}: {test.place.text}",),
        sides=(side(own.ranks, own.record), there),
        call=called(own.record),
        others=there.ranks,
        elsewhere=elsewhere,
        test=test.quoted.rstrip(":"),
    )


def _past(context: Context, past: _Site, inside: _Site) -> Iterator[Finding]:
    """Ranks behind a loop in which the others still are; a way around in it is another matter."""
    sources = context.sources
    one, other = past.record, inside.record
    ways = zip(one.path, other.path, strict=False)
    fork = next(((a, b) for a, b in ways if (a.file, a.line) != (b.file, b.line)), None)
    behind = (
        sources.in_one_loop(one, other) is False
        and fork is not None
        # In the function in which the two ways part, further down.
        and (fork[0].file, fork[0].function) == (fork[1].file, fork[1].function)
        and fork[0].line > fork[1].line
    )
    if not (behind and past.of_all and inside.of_all) or sources.alternatives(one, other):
        return
    if not _is_plain(sources, other):
        return
    yield catalogue.finding(
        "uneven-inputs.past-the-loop",
        min(past.ranks, inside.ranks, key=len),
        waiting=context.victims,
        sides=(side(past.ranks, past.record), side(inside.ranks, inside.record)),
        past=past.ranks,
        inside=inside.ranks,
        call=called(inside.record),
    )


def _ended_before(
    context: Context, at: Mapping[int, Collective], ended: Ranks
) -> Iterator[Finding]:
    """Ranks whose process ended without an error, while all others wait at one call."""
    sites, sources = _sites(at), context.sources
    site = sites[0]
    if len(sites) != 1 or not sources.knows(site.record) or not site.of_all:
        return
    test = sources.condition(site.record, None, site.ranks, ended)
    if test is None:
        if _is_plain(sources, site.record):
            kind, ranks = "missing-destroy.ended", ended
            if site.record.part is Part.BACKWARD or sources.in_a_loop(site.record):
                # They made fewer turns of the loop; or the others made more.
                kind, ranks = "uneven-inputs.ended", min(ended, site.ranks, key=len)
            yield catalogue.finding(
                kind,
                ranks,
                waiting=context.victims,
                sides=(side(site.ranks, site.record), side(ended, None)),
                ended=ended,
                stuck=site.ranks,
                call=called(site.record),
            )
    elif test.decides >= Varies.BY_RANK and not sources.answered(site.record, test):
        yield _alone(context, site, test, side(ended, None))


def _is_plain(sources: Sources, record: Collective) -> bool:
    """True where no way leads around the call, and no collective at all is only for some ranks."""
    return sources.way_around(record) is None and not sources.any_by_rank(WAIT)
