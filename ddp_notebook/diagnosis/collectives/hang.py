"""The rule for gradients that some ranks reduce and another rank does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
    inside = [e for e in context.case.ranks if _is_in_a_pass(context, e)]
    if not inside:
        return
    waiting = tuple(e.rank for e in inside)
    reasons: dict[_Reason, dict[int, tuple[str, ...]]] = {}
    for e in context.case.ranks:
        told = _why_not(e, inside[0]) if e.rank not in waiting else None
        if told is not None:
            reasons.setdefault(told[0], {})[e.rank] = told[1]
    under = {
        rank: (reason, lines)
        for reason, of in reasons.items()
        if reason.category is Category.NO_SYNC_MISUSE
        for rank, lines in of.items()
    }
    others = tuple(sorted(under))
    culprits, cause = _whose_no_sync(context, inside[0], waiting, others)
    if culprits:
        reason, lines = under[others[0]]
        yield Finding(reason.category, culprits, cause, reason.remedy, waiting, lines)
        return
    for reason, of in reasons.items():
        cause = f"{reason.cause}{in_brackets(reason.place)}"
        facts = tuple(line for lines in of.values() for line in lines)
        yield Finding(
            reason.category,
            tuple(of),
            cause,
            reason.remedy,
            waiting,
            tuple(dict.fromkeys(facts)),
        )


def _whose_no_sync(
    context: Context, e: RankReport, waiting: Ranks, under: Ranks
) -> tuple[Ranks, str]:
    """The culprits, and the cause, where not simply those `under` no_sync are wrong; else nobody.

    Where most ranks are under it, those that wait reduce in other steps than most. As many ranks
    on both sides leave it open, unless the code, or a step made with gradients of no_sync, tells.
    """
    at = f" at {e.path[-1]}" if e.path else ""
    if len(under) > len(waiting):
        return waiting, (
            f"{verb(waiting, 'reduces', 'reduce')} gradients in a backward{at} that "
            f"{name_ranks(under)} ran under no_sync"
        )
    stepped = any(
        replica.local_steps
        for report in context.case.ranks
        if report.rank not in waiting
        for replica in report.parts.replicas
    )
    ranks = tuple(sorted((*waiting, *under)))
    even = len(under) == len(waiting) and not stepped
    if not even or under == singled_out(context.sources, ("no_sync",), ranks):
        return (), ""
    return ranks, (
        f"differ in a backward{at}: {name_ranks(waiting)} {verb(waiting, 'reduces', 'reduce')} "
        f"gradients, {name_ranks(under)} {verb(under, 'runs', 'run')} it under no_sync; which of "
        "them is meant cannot be told"
    )


def _is_in_a_pass(context: Context, e: RankReport) -> bool:
    """True of a rank that waits in a forward or backward pass of DDP, or was refused there."""
    records = context.collectives.pending(e.rank) if e.activity is Activity.WAITING else ()
    if e.activity is Activity.FAILED:
        records = context.collectives.of.get(e.rank, ())[-1:]
        records = tuple(other for other in records if other.phase is Phase.REFUSED)
    return any(record.part in (Part.BACKWARD, Part.FORWARD) for record in records)


@dataclass(frozen=True, slots=True)
class _Reason:
    """Why a rank does not reduce what others reduce, and the line of code."""

    category: Category
    cause: str
    remedy: str
    place: Place | None


def _why_not(e: RankReport, other: RankReport) -> tuple[_Reason, tuple[str, ...]] | None:
    """Why rank `e` does not reduce what `other` reduces, and the counters that tell it."""
    others = {replica.key: replica for replica in other.parts.replicas}
    for mine in e.parts.replicas:
        theirs = others.get(mine.key)
        reason = _difference(mine, theirs) if theirs is not None else None
        if theirs is not None and reason is not None:
            return reason, tuple(
                f"rank {rank}: {c.forwards} forwards through the wrapper, {c.no_sync_forwards} of "
                f"them under no_sync, {c.bypasses} around it, {c.steps} steps"
                for rank, c in ((e.rank, mine), (other.rank, theirs))
            )
    return None


def _difference(mine: ReplicaCounts, theirs: ReplicaCounts) -> _Reason | None:
    title = mine.name or f"the DistributedDataParallel of {mine.type}"
    if mine.unready_steps and not theirs.unready_steps:
        names = some(mine.unready or ("some parameters",))
        return _Reason(
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
        return _Reason(
            Category.NO_SYNC_MISUSE,
            f"a backward of {title} runs there under no_sync, in which the other ranks reduce",
            "Enter no_sync on all ranks in the same steps, or on none.",
            mine.local_place,
        )
    if mine.bypasses > theirs.bypasses and mine.forwards + mine.bypasses >= theirs.forwards:
        return _Reason(
            Category.DDP_BYPASS,
            f"the forward there calls the module inside {title}, and the others' call the wrapper",
            "Call the DistributedDataParallel object itself on every rank.",
            mine.bypass_place,
        )
    return None
