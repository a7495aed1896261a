"""What `check` of the notebooks' exercises says of an answer."""

from __future__ import annotations

from typing import Any

from ddp_notebook.workshop import check


def assert_right(name: str, answer: Any, says: str = "") -> None:
    """The answer passes, and is told why."""
    verdict = check(name, answer)
    assert verdict.passed, verdict
    assert verdict.text.startswith("right"), verdict
    assert says in verdict.text, verdict


def assert_wrong(name: str, answer: Any, says: str) -> None:
    """The answer does not pass, and is told what is wrong with it."""
    verdict = check(name, answer)
    assert not verdict.passed, verdict
    assert says in verdict.text, verdict
