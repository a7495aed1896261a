"""Logs of ranks that waited in vain: facts, and no guess of what the log does not tell."""

from __future__ import annotations

from pathlib import Path

import pytest
from collective_cases import diagnosed_log

from ddp_notebook.errors import UsageMistake
from ddp_notebook.jobs.target import Left


def traceback(text: str, error: str) -> str:
    where = '  File "train.py", line 3, in <module>'
    return f"Traceback (most recent call last):\n{where}\n    {text}\n{error}\n"


def summary(*codes: int) -> str:
    """What torchrun says of its ranks; it has closed those that SIGTERM ended."""
    closed = "".join(
        f"W api.py] Sending process {50 + rank} closing signal SIGTERM\n"
        for rank, code in enumerate(codes)
        if code == -15
    )
    rows = (
        f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: {50 + rank})\n"
        for rank, code in enumerate(codes)
    )
    return closed + "".join(rows)


def test_who_gave_up_and_who_did_not_stands_in_what_is_undecided(tmp_path: Path) -> None:
    late = traceback("dist.barrier()", "RuntimeError: Timed out waiting 12000ms for send operation")
    closed = traceback("dist.barrier()", "RuntimeError: [pair.cc:553] Connection closed by peer")
    (finding,) = diagnosed_log(tmp_path, late + summary(1, 1, -15)).findings
    assert "Ranks 0-1 gave up waiting, but rank 2 did not" in finding.cause
    (finding,) = diagnosed_log(tmp_path, closed + summary(1, 1)).findings
    assert finding.category.value == "undecided" and "which closed it first" in finding.cause


def test_logs_of_two_jobs_are_not_judged_as_one(tmp_path: Path) -> None:
    for name, pid in (("one", 50), ("other", 70)):
        row = f"  rank      : 0 (local_rank: 0)\n  exitcode  : 1 (pid: {pid})\n"
        (tmp_path / f"{name}.log").write_text(traceback("f()", f"ValueError: {name}") + row)
    with pytest.raises(UsageMistake, match="in their logs rank 0 is process 50"):
        Left([tmp_path]).why()
    assert Left([tmp_path / "one.log"]).why().diagnosis.findings


def test_errors_that_differ_and_name_no_rank_are_facts(tmp_path: Path) -> None:
    errors = traceback("f()", "ValueError: a") + traceback("f()", "KeyError: 'b'")
    (finding,) = diagnosed_log(tmp_path, errors + summary(1, 1)).findings
    assert (finding.category.value, finding.ranks) == ("undecided", ())
    assert "does not tell which ranks raised ValueError: a; KeyError: 'b'" in finding.cause
