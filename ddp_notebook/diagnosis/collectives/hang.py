"""The rule for gradients that some ranks reduce and another rank does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.source_code.singled_out import singled_out
from ddp_notebook.diagnosis.training.replicas import some
from ddp_notebook.model import (
    Activity,
    Category,
    Finding,
    Part,
    Phase,
    Place,
    RankReport,
    Ranks,
    ReplicaCounts,
    in_brackets,
    name_ranks,
    verb,
)


def unreduced_gradients(context: Context) -> Iterator[Finding]:
    """A rank skips the reduction of a backward in which the others wait, or were refused.

    The counters of its DistributedDataParallel objects tell why.
    """
    waiting = [e for e in context.case.ranks if _is_in_a_pass(context, e)]
    if not waiting:
        return
    ranks = tuple(e.rank for e in waiting)
    others = [e for e in context.case.ranks if e not in waiting]
    findings = [finding for e in others for finding in _why_not(e, waiting[0], ranks)]
    under = [finding for finding in findings if finding.category is Category.NO_SYNC_MISUSE]
    if len(under) > len(ranks):
        yield _reduces_too_soon(waiting[0], ranks, under)
    elif _may_be_either(ranks, under, others):
        yield from _either(context, waiting[0], ranks, under)
    else:
        yield from findings


def _may_be_either(waiting: Ranks, under: list[Finding], others: list[RankReport]) -> bool:
    return len(under) == len(waiting) and not any(map(_has_stepped, others))


def _has_stepped(e: RankReport) -> bool:
    """True of a rank that has made a step with gradients of no_sync: a mistake of its own."""
    return any(replica.local_steps for replica in e.replicas)


def _either(
    context: Context, e: RankReport, waiting: Ranks, under: list[Finding]
) -> Iterator[Finding]:
    """As many ranks reduce as run under no_sync: what is meant the code may tell."""
    others = tuple(finding.ranks[0] for finding in under)
    ranks = tuple(sorted((*waiting, *others)))
    if others == singled_out(context.sources, ("no_sync",), ranks):
        yield from under
        return
    cause = (
        f"differ in a backward{_at(e)}: {name_ranks(waiting)} {verb(waiting, 'reduces', 'reduce')} "
        f"gradients, {name_ranks(others)} {verb(others, 'runs', 'run')} it under no_sync; which of "
        "them is meant cannot be told"
    )
    yield replace(under[0], ranks=ranks, cause=cause)


def _at(e: RankReport) -> str:
    return f" at {e.path[-1]}" if e.path else ""


def _is_in_a_pass(context: Context, e: RankReport) -> bool:
    """True of a rank that waits in a forward or backward pass of DDP, or was refused there."""
    records = context.collectives.pending(e.rank) if e.activity is Activity.WAITING else ()
    if e.activity is Activity.FAILED:
        records = context.collectives.of.get(e.rank, ())[-1:]
        records = tuple(other for other in records if other.phase is Phase.REFUSED)
    return any(record.part in (Part.BACKWARD, Part.FORWARD) for record in records)


def _reduces_too_soon(e: RankReport, waiting: Ranks, under: list[Finding]) -> Finding:
    """Most ranks are under no_sync there: those that wait reduce in other steps than most."""
    others = tuple(finding.ranks[0] for finding in under)
    return replace(
        under[0],
        ranks=waiting,
        cause=f"{verb(waiting, 'reduces', 'reduce')} gradients in a backward{_at(e)} that "
        f"{name_ranks(others)} ran under no_sync",
    )


def _why_not(e: RankReport, other: RankReport, waiting: Ranks) -> Iterator[Finding]:
    """Why rank `e` does not reduce what `other` reduces; nothing if its counters do not tell."""
    others = {replica.key: replica for replica in other.replicas}
    for mine in e.replicas:
        theirs = others.get(mine.key)
        reason = _difference(mine, theirs) if theirs is not None else None
        if theirs is not None and reason is not None:
            category, cause, remedy, place = reason
            at = in_brackets(place)
            lines = tuple(
                f"rank {rank}: {c.forwards} forwards through the wrapper, {c.no_sync_forwards} of "
                f"them under no_sync, {c.bypasses} around it, {c.steps} steps"
                for rank, c in ((e.rank, mine), (other.rank, theirs))
            )
            yield Finding(category, (e.rank,), f"{cause}{at}", remedy, waiting, lines)
            return


_Reason: TypeAlias = tuple[Category, str, str, Place | None]
"""Category, cause, remedy, and the line of code."""


def _difference(mine: ReplicaCounts, theirs: ReplicaCounts) -> _Reason | None:
    title = mine.name or f"the DistributedDataParallel of {mine.type}"
    if mine.unready_steps and not theirs.unready_steps:
        names = some(mine.unready or ("some parameters",))
        return (
            Category.UNUSED_PARAMS,
            f"{names} of {title} got no gradient there, so a bucket is not reduced that the "
            "others reduce",
            "Use the parameters on every rank in every step, or give DistributedDataParallel "
            "find_unused_parameters=True.",
            mine.bad_place,
        )
    reduced = mine.forwards - mine.no_sync_forwards
    if reduced >= theirs.forwards - theirs.no_sync_forwards:
        return None
    if mine.backwards < theirs.backwards:
        return None  # it has not begun the backward in which the others are
    if mine.no_sync_forwards > theirs.no_sync_forwards and mine.forwards >= theirs.forwards:
        return (
            Category.NO_SYNC_MISUSE,
            f"a backward of {title} runs there under no_sync, in which the other ranks reduce",
            "Enter no_sync on all ranks in the same steps, or on none.",
            mine.local_place,
        )
    if mine.bypasses > theirs.bypasses and mine.forwards + mine.bypasses >= theirs.forwards:
        return (
            Category.DDP_BYPASS,
            f"the forward there calls the module inside {title}, and the others' call the wrapper",
            "Call the DistributedDataParallel object itself on every rank.",
            mine.bypass_place,
        )
    return None
