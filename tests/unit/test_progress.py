"""Which ranks count as busy with code of their own."""

from __future__ import annotations

import pytest
from traces import report

from ddp_notebook.diagnosis.progress import doing, where_busy, works
from ddp_notebook.model import Activity, Place, RankReport


@pytest.mark.parametrize(
    ("evidence", "expected"),
    [
        (RankReport(0, Activity.BUSY), True),
        (report(0, Activity.BUSY, polls_for="x.pt"), False),
        (report(0, Activity.SILENT, process="running"), True),
        (report(0, Activity.SILENT, process="sleeping"), False),
        (RankReport(0, Activity.SILENT), False),
        (report(0, Activity.WAITING, process="running"), False),
    ],
)
def test_a_rank_works_when_it_is_busy_or_too_busy_to_answer(
    evidence: RankReport, expected: bool
) -> None:
    assert works(evidence) is expected


@pytest.mark.parametrize(
    ("evidence", "expected"),
    [
        (RankReport(0, Activity.BUSY), ""),
        (RankReport(0, Activity.BUSY, doing="cell 3, line 2"), " in cell 3, line 2"),
        (RankReport(0, Activity.SILENT), " and does not answer"),
        (
            RankReport(0, Activity.SILENT, doing="last seen: cell 3"),
            " and does not answer (last seen: cell 3)",
        ),
    ],
)
def test_where_a_rank_is_busy_stands_after_the_word(evidence: RankReport, expected: str) -> None:
    assert where_busy(evidence) == expected


def test_ranks_whose_collective_was_refused_are_told_alike() -> None:
    """The refusal names the rank itself and the first that differed: as many texts as ranks."""
    shown = {
        doing(
            report(
                rank,
                Activity.FAILED,
                error_type="Mismatch",
                error_text=f"Collective 4 does not match: rank {rank} called x, rank 3 barrier",
                error_at=(Place("cell 3", 11, ""),),
            )
        )
        for rank in range(3)
    }
    assert shown == {"not sent: the collective at cell 3, line 11 does not match another rank's"}
