"""A thousand ranks by generated records: the verdict of eight, in little time."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
from traces import all_reduce, barrier

from ddp_notebook.diagnosis import diagnose_run
from ddp_notebook.model import (
    Activity,
    Case,
    Collective,
    Collectives,
    GroupMade,
    Phase,
    RankReport,
    ShardedUnit,
)

STEPS = 20


def stalled(size: int, culprit: int) -> Case:
    """Every rank waits in its last step; `culprit` is in a barrier instead."""
    step = replace(all_reduce(5), phase=Phase.DONE, done_ns=1)
    records = {rank: _records(rank, [step] * STEPS) for rank in range(size)}
    short = [*[step] * (STEPS - 2), replace(barrier(9), phase=Phase.ISSUED)]
    records[culprit] = _records(culprit, short)
    reports = tuple(
        RankReport(
            rank,
            Activity.WAITING,
            "collective",
            entered=1,
            left=1,
            initialized=True,
            path=issued[-1].path,
            waits_for=issued[-1].number,
        )
        for rank, issued in records.items()
    )
    return Case(reports, collectives=Collectives(records, {"default": tuple(range(size))}))


def _records(rank: int, issued: list[Collective]) -> tuple[Collective, ...]:
    *done, last = (
        replace(each, rank=rank, number=number, slot=number, issued_ns=number + 1)
        for number, each in enumerate(issued)
    )
    return (*done, replace(last, phase=Phase.ISSUED, done_ns=0))


@pytest.mark.parametrize("size", [8, 1000])
def test_the_rank_to_blame_is_found_among_many_in_two_seconds_of_a_core(size: int) -> None:
    culprit = random.Random(size).randrange(size)
    case = stalled(size, culprit)
    begun_s = time.process_time()
    findings = diagnose_run(case).findings
    assert time.process_time() - begun_s < 2
    assert [(f.category, f.ranks) for f in findings] == [("conditional-collective", (culprit,))]


@pytest.mark.parametrize("size", [8, 1000])
def test_so_it_is_where_ranks_are_in_a_mesh_and_shard_a_model(size: int) -> None:
    culprit, tp = random.Random(size).randrange(size), 4
    rows = [tuple(range(first, first + tp)) for first in range(0, size, tp)]
    columns = [tuple(range(at, size, tp)) for at in range(tp)]
    named = [("tp", row) for row in rows] + [("dp", column) for column in columns]
    made = tuple(GroupMade(n, ranks, name, of_mesh=True) for n, (name, ranks) in enumerate(named))
    units = [
        tuple(ShardedUnit(0, f"layers.{n}", 1000, True, True, column, 2) for n in range(12))
        for column in columns
    ]
    case = stalled(size, culprit)
    ranks = (replace(e, groups_made=made, sharded=units[e.rank % tp]) for e in case.ranks)
    case = replace(case, ranks=tuple(ranks))
    begun_s = time.process_time()
    (finding,) = diagnose_run(case).findings
    assert time.process_time() - begun_s < 2
    assert (finding.category, finding.ranks) == ("conditional-collective", (culprit,))
    at = f"rank {culprit} is tp={culprit % tp}, dp={culprit // tp}"
    assert any(at in line for line in finding.evidence), finding.evidence
