"""Ranks whose DataLoader has stuck workers are told; those whose workers are slow are busy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from traces import BUSY, all_reduce, play, with_facts

from ddp_notebook.diagnosis import diagnose_run
from ddp_notebook.model import Activity, Case, Category, Finding, Place, RankReport, Worker, codec
from ddp_notebook.session.runs.stall_detector import stuck

AT = Place("data.py", 14, "__getitem__", "with lock:")
LOCKED = Worker(71, due=True, forked=True, still_s=2.0, locked=True, place=AT)


def loading(*workers: Worker) -> RankReport:
    return with_facts(BUSY, doing="train.py, line 3", workers=workers)


def waits_for(of: RankReport) -> Case:
    """Rank 1 is `of`; the others wait for it in an all_reduce."""
    step = all_reduce(5)
    return play({0: [step, step], 1: [step], 2: [step, step]}, {1: of})


def the_one(case: Case) -> Finding:
    (finding,) = diagnose_run(case).findings
    return finding


def test_a_worker_that_waits_for_a_lock_for_ever_is_the_cause() -> None:
    case = waits_for(loading(LOCKED, Worker(72)))
    finding = the_one(case)
    assert (finding.category, finding.ranks) == (Category.DATALOADER_DEADLOCK, (1,))
    assert finding.waiting == (0, 2) and not finding.passing
    assert "a DataLoader worker waits for a lock" in finding.cause
    assert finding.evidence[0].startswith("Rank 1, worker 71: ")
    assert "forked" in finding.evidence[-1]
    assert "num_workers=0" in finding.remedy and "spawn" in finding.remedy
    assert "data.py, line 14, in __getitem__: with lock:" in finding.evidence
    assert stuck(case, diagnose_run(case))


@pytest.mark.parametrize(
    "workers",
    [
        (replace(LOCKED, locked=False),),  # it sleeps, reads, or waits with a limit
        (replace(LOCKED, still_s=0.4),),  # that may be a moment's picture
        (replace(LOCKED, due=False), Worker(72, due=True)),  # the next batch is another's
    ],
)
def test_a_worker_that_may_still_deliver_makes_its_rank_busy(workers: tuple[Worker, ...]) -> None:
    case = waits_for(loading(*workers))
    finding = the_one(case)
    assert (finding.category, finding.ranks, finding.passing) == (Category.STRAGGLER, (1,), True)
    assert any("waits for a batch of worker" in fact for fact in finding.evidence)
    assert not stuck(case, diagnose_run(case))


def test_a_worker_that_is_stopped_says_how_it_goes_on() -> None:
    finding = the_one(waits_for(loading(replace(LOCKED, locked=False, stopped=True))))
    assert finding.category is Category.DATALOADER_DEADLOCK
    assert finding.remedy == "Let the worker continue: `kill -CONT 71`."


def test_the_same_trouble_on_all_ranks_is_one_finding_though_nobody_waits_in_torch() -> None:
    ranks = tuple(replace(loading(replace(LOCKED, pid=70 + rank)), rank=rank) for rank in range(3))
    for case in (
        Case(ranks),
        replace(play({r: [all_reduce(5)] for r in range(3)}), ranks=ranks),
    ):
        finding = the_one(case)
        assert finding.ranks == (0, 1, 2)
        for rank, fact in enumerate(finding.evidence[:3]):
            assert fact.startswith(f"Rank {rank}, worker {70 + rank}: ")
        assert stuck(case, diagnose_run(case))


def test_a_worker_that_was_not_forked_is_not_said_to_be() -> None:
    finding = the_one(waits_for(loading(replace(LOCKED, forked=False, place=None))))
    assert "forked" not in finding.cause and " at " not in finding.cause


def test_workers_are_told_apart_from_a_rank_that_only_computes() -> None:
    said = diagnose_run(waits_for(loading(LOCKED))).doing
    waits = "waiting for a batch of the DataLoader (train.py, line 3)"
    assert said is not None and said[1] == waits
    assert codec.decode(RankReport, codec.encode(loading(LOCKED))) == loading(LOCKED)
    assert loading().activity is Activity.BUSY
