"""A thousand ranks by generated records: the verdict of eight, in little time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from traces import all_reduce, barrier, with_facts

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


def in_a_mesh(case: Case) -> Case:
    """The same ranks, which also shard a model over a mesh of two dimensions."""
    size, tp = len(case.ranks), 4
    rows = [tuple(range(first, first + tp)) for first in range(0, size, tp)]
    columns = [tuple(range(at, size, tp)) for at in range(tp)]
    named = [("tp", row) for row in rows] + [("dp", column) for column in columns]
    made = tuple(GroupMade(n, ranks, name, of_mesh=True) for n, (name, ranks) in enumerate(named))
    units = [
        tuple(ShardedUnit(0, f"layers.{n}", 1000, True, column, 2) for n in range(12))
        for column in columns
    ]
    ranks = (with_facts(e, groups_made=made, sharded=units[e.rank % tp]) for e in case.ranks)
    return replace(case, ranks=tuple(ranks))


@pytest.mark.parametrize("size", [8, 1000])
def test_the_rank_to_blame_is_found_among_many(size: int) -> None:
    culprit = random.Random(size).randrange(size)
    findings = diagnose_run(stalled(size, culprit)).findings
    assert [(f.category, f.ranks) for f in findings] == [("conditional-collective", (culprit,))]


@pytest.mark.parametrize("size", [8, 1000])
def test_so_it_is_where_ranks_are_in_a_mesh_and_shard_a_model(size: int) -> None:
    culprit = random.Random(size).randrange(size)
    (finding,) = diagnose_run(in_a_mesh(stalled(size, culprit))).findings
    assert (finding.category, finding.ranks) == ("conditional-collective", (culprit,))
    at = f"rank {culprit} is tp={culprit % 4}, dp={culprit // 4}"
    assert any(at in line for line in finding.evidence), finding.evidence


@pytest.mark.parametrize("case_of", [stalled, lambda *of: in_a_mesh(stalled(*of))])
def test_four_times_the_ranks_cost_about_four_times_the_time(
    case_of: Callable[[int, int], Case],
) -> None:
    """Sixteen times, if each rank were compared with each."""

    def cost_s(size: int) -> float:
        case = case_of(size, size // 3)
        began_s = time.process_time()
        diagnose_run(case)
        return time.process_time() - began_s

    few, many = (min(cost_s(size) for _ in range(3)) for size in (256, 1024))
    assert many < 9 * few
