"""Rules about ranks that died or raised in a run: who was first, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from ddp_notebook.diagnosis.collectives import wait_graph
from ddp_notebook.diagnosis.collectives.describe import numbered
from ddp_notebook.diagnosis.collectives.out_of_step import ended_by_conflicts
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.setup import torch_errors
from ddp_notebook.model import (
    Activity,
    Category,
    Collective,
    Finding,
    Phase,
    RankReport,
)
from ddp_notebook.state.descriptions import exit_text

_ENDED_BY_OTHERS = (-15, 143)
"""SIGTERM: a launcher ends the ranks that are left when one has died."""


def ended(context: Context) -> Iterator[Finding]:
    """Ranks that died or raised, the first in time first, without those that others dragged along.

    Nor those whose end is explained by what met in a collective of theirs.
    """
    explained = ended_by_conflicts(context)
    gone = [e for e in context.case.ranks if _ended_badly(e) and e.rank not in explained]
    dragged = _dragged_along(context, gone)
    first = [e for e in gone if e.rank not in dragged]
    ranks = tuple(e.rank for e in first)
    findings = [_died(context, e) for e in first if e.activity is Activity.DEAD]
    for finding in torch_errors.all_but(context.case, Category.ENV_INVALID):
        own = tuple(rank for rank in finding.ranks if rank in ranks)
        if own:
            findings.append(_with_waiters(context, replace(finding, ranks=own)))
    yield from sorted(findings, key=partial(_time, context))


def _ended_badly(e: RankReport) -> bool:
    return (e.activity is Activity.DEAD and e.exit_code != 0) or e.activity is Activity.FAILED


def _dragged_along(context: Context, gone: list[RankReport]) -> set[int]:
    """The ranks that ended because another had: they were inside a collective, it was not there."""
    dead = [e for e in gone if e.activity is Activity.DEAD]
    by_others = [e.rank for e in dead if e.exit_code in _ENDED_BY_OTHERS]
    dragged = set(by_others) if len(by_others) < len(gone) else set()
    ended_early = {e.rank for e in gone}
    inside: dict[int, set[int]] = {}
    for e in gone:
        last = last_record(context, e.rank)
        if last is not None and last.phase in (Phase.ISSUED, Phase.FAILED):
            inside[e.rank] = set(wait_graph.missing(context.case, last)) & ended_early
    for rank, others in inside.items():
        # One that ended outside of any collective, or that no ended rank waits for, was first.
        if any(rank not in inside.get(other, set()) for other in others):
            dragged.add(rank)
    return dragged


def last_record(context: Context, rank: int) -> Collective | None:
    """The last thing that a rank issued."""
    records = context.collectives.of.get(rank, ())
    return records[-1] if records else None


def _time(context: Context, finding: Finding) -> int:
    """When the first of its ranks did the last thing that is known of it."""
    records = [last_record(context, rank) for rank in finding.ranks]
    return min((max(each.issued_ns, each.done_ns) for each in records if each), default=0)


def _died(context: Context, e: RankReport) -> Finding:
    how = exit_text(e.exit_code) if e.exit_code is not None else "its process ended"
    maybe = ", as the kernel does when memory runs out" if e.exit_code == -9 else ""
    last = last_record(context, e.rank)
    after = f", after {numbered(last)}" if last else ""
    restart = f"%ddp_restart --ranks {e.rank}"
    memory = "Use less memory per rank, then bring" if e.exit_code == -9 else "Bring"
    return Finding(
        Category.RANK_DIED,
        (e.rank,),
        f"{how}{maybe}; the others wait for it, or lost their connection to it",
        f"{memory} it back: {restart}",
        context.victims,
        (f"rank {e.rank} {how}{after}", *e.last_words.strip().splitlines()[-1:]),
        commands=(restart,),
    )


def _with_waiters(context: Context, finding: Finding) -> Finding:
    """An error, and who waits for the rank in what."""
    stuck = tuple(rank for rank in context.graph.stuck if rank in context.graph.at)
    where = (context.standing(stuck),) if stuck else ()
    return replace(finding, waiting=context.victims, evidence=(*finding.evidence, *where))
