"""What a collective is for: a unit of FSDP2, a tensor of DTensor, a micro-batch of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ddp_notebook.model import Case, Collective, Collectives, PipelinePart, RankReport


def with_purposes(case: Case) -> Case:
    """`case`, in which what each rank waits in says what for, where that is known."""
    reports = {
        e.rank: e for e in case.ranks if e.waits_for is not None and (e.purpose or e.pipelines)
    }
    if not reports:
        return case
    of = dict(case.collectives.of)
    for rank, report in reports.items():
        of[rank] = tuple(_with_purpose(record, report, reports) for record in of.get(rank, ()))
    collectives = case.collectives
    return replace(case, collectives=Collectives(of, collectives.groups, collectives.first))


def _with_purpose(
    record: Collective, report: RankReport, others: Mapping[int, RankReport]
) -> Collective:
    if record.number != report.waits_for:
        return record
    purpose = report.purpose
    if not purpose and record.is_point_to_point and record.peer is not None:
        purpose = _message(record, report, others.get(record.peer))
    return replace(record, purpose=purpose) if purpose else record


def _message(record: Collective, report: RankReport, peer: RankReport | None) -> str:
    """``micro-batch 3's activations of stage 0 (1F1B)``; empty outside of a pipeline."""
    mine = next((p for p in report.pipelines if (p.forward, p.backward) != (None, None)), None)
    theirs = _same(mine, peer) if mine is not None and peer is not None else None
    if mine is None or theirs is None or len(mine.stages) != 1 or len(theirs.stages) != 1:
        return ""
    own, other = mine.stages[0], theirs.stages[0]
    received = record.operation == "recv"
    sender, receiver = (other, own) if received else (own, other)
    what, index = ("activations", mine.forward)
    if sender > receiver:
        what, index = "gradients", mine.backward
    # Which one a send is of is not known: schedules wait for it later.
    which = f"micro-batch {index}'s " if received and index is not None else ""
    return f"{which}{what} of stage {sender} ({mine.schedule})"


def _same(part: PipelinePart, peer: RankReport) -> PipelinePart | None:
    return next((p for p in peer.pipelines if p.members == part.members), None)
