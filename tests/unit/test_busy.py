"""Which ranks count as busy with code of their own."""

from __future__ import annotations

import pytest

from ddp_notebook.analysis.busy import works
from ddp_notebook.model import Activity, RankEvidence


@pytest.mark.parametrize(
    ("evidence", "expected"),
    [
        (RankEvidence(0, Activity.BUSY), True),
        (RankEvidence(0, Activity.BUSY, polls_for="x.pt"), False),
        (RankEvidence(0, Activity.SILENT, process="running"), True),
        (RankEvidence(0, Activity.SILENT, process="sleeping"), False),
        (RankEvidence(0, Activity.SILENT), False),
        (RankEvidence(0, Activity.WAITING, process="running"), False),
    ],
)
def test_a_rank_works_when_it_is_busy_or_too_busy_to_answer(
    evidence: RankEvidence, expected: bool
) -> None:
    assert works(evidence) is expected
