"""What was found in the last run is kept until the next begins."""

from __future__ import annotations

from ddp_notebook.model import Category, Diagnosis, Finding
from ddp_notebook.session.findings import Found, LastFindings

WRONG = Diagnosis((Finding(Category.UNDECIDED, (0,), "why", "what"),))


def test_a_finding_is_forgotten_when_the_next_run_begins() -> None:
    kept, first = LastFindings(), Found("cell 3", 3)
    kept.begin(first)
    first.take(WRONG)
    assert kept.last is first and first.diagnosis is not None
    assert first.diagnosis.run is not None and first.diagnosis.run.title == "cell 3"
    second = Found("cell 4", 4)
    kept.begin(second)
    assert kept.last is second and second.diagnosis is None


def test_a_run_beside_a_newer_one_is_not_forgotten_before_both_are_over() -> None:
    over = [False]
    kept, older, newer = LastFindings(), Found("cell 3", 3, lambda: over[0]), Found("cell 4", 4)
    kept.begin(older)
    kept.begin(newer)
    older.take(WRONG)
    over[0] = True
    assert kept.last is older
    kept.begin(Found("cell 5"))
    assert kept.last is not None and kept.last.title == "cell 5"


def test_a_run_that_went_well_after_all_has_no_findings() -> None:
    found = Found("train.py")
    found.take(WRONG)
    found.nothing()
    assert found.diagnosis is None and found.run.over
