"""Pipelines whose stages, micro-batches or schedules do not fit together; what messages are for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from collective_cases import the_one
from traces import message, play, with_facts

from ddp_notebook.diagnosis import diagnose_run
from ddp_notebook.model import Case, Finding, PipelinePart


def part(
    stage: int,
    of: int = 3,
    micro_batches: int = 4,
    schedule: str = "1F1B",
    meant: int | None = None,
    forward: int | None = None,
    backward: int | None = None,
) -> PipelinePart:
    at = (stage if meant is None else meant,)
    members = tuple(range(of))
    return PipelinePart(schedule, (stage,), of, micro_batches, at, members, forward, backward)


def stuck() -> Case:
    """Rank 1 waits for a second message of rank 0, which waits for one of rank 1."""
    return play(
        {
            0: [message("send", 1, 5), message("recv", 1, 5)],
            1: [message("recv", 0, 5), message("recv", 0, 5)],
            2: [message("recv", 1, 5)],
        }
    )


def with_parts(case: Case, *parts: PipelinePart) -> Case:
    ranks = zip(case.ranks, parts, strict=True)
    return replace(case, ranks=tuple(with_facts(e, pipelines=(p,)) for e, p in ranks))


def first_of(case: Case) -> Finding:
    return diagnose_run(case).findings[0]


@pytest.mark.parametrize(
    ("parts", "ranks", "words"),
    [
        (
            (part(0), part(1, micro_batches=2), part(2)),
            (1,),
            "(rank 1: 2 micro-batches; ranks 0 and 2: 4 micro-batches)",
        ),
        (
            (part(0), part(1), part(1, meant=2)),
            (2,),
            "runs stage 1 of the pipeline, which rank 1 has too, where the schedule expects "
            "stage 2; no rank has stage 2",
        ),
        (
            (part(0, schedule="GPipe"), part(1), part(2)),
            (0,),
            "(rank 0: schedule GPipe; ranks 1 and 2: schedule 1F1B)",
        ),
    ],
)
def test_ranks_of_one_pipeline_that_do_not_fit_together(
    parts: Sequence[PipelinePart], ranks: tuple[int, ...], words: str
) -> None:
    finding = first_of(with_parts(stuck(), *parts))
    assert (finding.category, finding.ranks) == ("schedule-mismatch", ranks)
    assert words in finding.cause


def test_pipelines_of_other_ranks_and_such_that_fit_are_left_alone() -> None:
    fit = with_parts(stuck(), part(0), part(1), part(2))
    assert all(f.category != "schedule-mismatch" for f in diagnose_run(fit).findings)
    others = (part(0), part(1, micro_batches=2), part(2))
    apart = [replace(p, members=(rank, rank + 3)) for rank, p in enumerate(others)]
    found = diagnose_run(with_parts(stuck(), *apart)).findings
    assert all(f.category != "schedule-mismatch" for f in found)


def test_a_message_of_a_pipeline_is_named_by_its_micro_batch_and_stage() -> None:
    case = with_parts(stuck(), part(0, backward=0), part(1, forward=1), part(2, forward=0))
    finding = first_of(case)
    assert "recv of micro-batch 0's gradients of stage 1 (1F1B) from rank 1" in finding.cause
    assert "recv of micro-batch 1's activations of stage 0 (1F1B) from rank 0" in finding.cause


def test_two_that_both_send_first_after_rounds_that_met_disagree_about_the_order() -> None:
    there, back = [message("send", 1, 5)] * 2, [message("recv", 1, 6)] * 2
    taken, given = [message("recv", 0, 7)] * 2, [message("send", 0, 8)] * 2
    case = play({0: [*there, *back, *there], 1: [*taken, *given, *given]})
    assert the_one(case).category == "p2p-mismatch"
    ping = [message("send", 1, 5), message("recv", 1, 6)]
    pong = [message("recv", 0, 7), message("send", 0, 8)]
    case = play({0: [*ping, *ping, ping[0], ping[0]], 1: [*pong, *pong, *pong]})
    assert the_one(case).category == "p2p-mismatch"
