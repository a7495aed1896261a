"""A thousand ranks by generated records: the verdict of eight, in little time."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
from traces import all_reduce, barrier

from ddp_notebook.diagnosis import diagnose_run
from ddp_notebook.model import Activity, Case, Collective, Collectives, Phase, RankReport

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
