"""Rules about ranks that ended in a run: who ended first, of what, and whom that holds up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from ddp_notebook.diagnosis.collectives import wait_graph
from ddp_notebook.diagnosis.context import Picture, in_slot
from ddp_notebook.diagnosis.setup import torch_errors
from ddp_notebook.model import (
    Activity,
    Category,
    Collective,
    Finding,
    Phase,
    RankReport,
    Ranks,
)
from ddp_notebook.state.descriptions import exit_text

_ENDED_BY_OTHERS = (-15, 143)
"""SIGTERM: a launcher ends the ranks that are left when one has died."""


def ended(picture: Picture, hurt: Ranks = ()) -> Iterator[Finding]:
    """Ranks that died or raised, the first in time first, without those that others dragged along.

    `hurt` are ranks whose end is explained already.
    """
    gone = [e for e in picture.case.ranks if _ended_badly(e) and e.rank not in hurt]
    dragged = _dragged_along(picture, gone)
    first = [e for e in gone if e.rank not in dragged]
    ranks = tuple(e.rank for e in first)
    found = [finding for e in first for finding in _died(picture, e)]
    for finding in torch_errors.all_but(picture.case, Category.ENV_INVALID):
        own = tuple(rank for rank in finding.ranks if rank in ranks)
        if own:
            found.append(_with_place(picture, replace(finding, ranks=own)))
    yield from sorted(found, key=partial(_time, picture))


def _ended_badly(e: RankReport) -> bool:
    return (e.activity is Activity.DEAD and e.exit_code != 0) or e.activity is Activity.FAILED


def _dragged_along(picture: Picture, gone: list[RankReport]) -> set[int]:
    """The ranks that ended because another had: they were inside a collective, it was not there."""
    dead = [e for e in gone if e.activity is Activity.DEAD]
    by_others = [e.rank for e in dead if e.exit_code in _ENDED_BY_OTHERS]
    dragged = set(by_others) if len(by_others) < len(gone) else set()
    ended_early = {e.rank for e in gone}
    inside: dict[int, set[int]] = {}
    for e in gone:
        last = last_record(picture, e.rank)
        if last is not None and last.phase in (Phase.ISSUED, Phase.FAILED):
            inside[e.rank] = set(wait_graph.missing(picture.case, last)) & ended_early
    for rank, others in inside.items():
        # One that ended outside of any collective, or is waited for by nobody's leave, was first.
        if any(rank not in inside.get(other, set()) for other in others):
            dragged.add(rank)
    return dragged


def last_record(picture: Picture, rank: int) -> Collective | None:
    """The last thing that a rank issued."""
    records = picture.case.collectives.of.get(rank, ())
    return records[-1] if records else None


def _time(picture: Picture, finding: Finding) -> int:
    """When the first of its ranks did the last thing that is known of it."""
    records = [last_record(picture, rank) for rank in finding.ranks]
    return min((max(each.issued_ns, each.done_ns) for each in records if each), default=0)


def _died(picture: Picture, e: RankReport) -> Iterator[Finding]:
    if e.activity is not Activity.DEAD:
        return
    how = exit_text(e.exit_code) if e.exit_code is not None else "its process ended"
    maybe = ", as the kernel does when memory runs out" if e.exit_code == -9 else ""
    last = last_record(picture, e.rank)
    after = f", after {in_slot(last)}" if last else ""
    words = e.last_words.strip().splitlines()
    remedy = f"Bring it back: %ddp_restart --ranks {e.rank}"
    if e.exit_code == -9:
        remedy = f"Use less memory per rank, then bring it back: %ddp_restart --ranks {e.rank}"
    yield Finding(
        Category.RANK_DIED,
        (e.rank,),
        f"{how}{maybe}; the others wait for it, or lost their connection to it",
        remedy,
        _others(picture, (e.rank,)),
        (f"rank {e.rank} {how}{after}", *words[-1:]),
    )


def _with_place(picture: Picture, finding: Finding) -> Finding:
    """An error, and who waits for the rank in what."""
    stuck = tuple(r for r in picture.graph.stuck if r in picture.graph.at)
    waiting = _others(picture, finding.ranks)
    if not stuck:
        return replace(finding, waiting=waiting)
    facts = (*finding.evidence, picture.standing(stuck))
    return replace(finding, waiting=waiting, evidence=facts)


def _others(picture: Picture, ranks: Ranks) -> Ranks:
    return tuple(rank for rank in picture.victims if rank not in ranks)
