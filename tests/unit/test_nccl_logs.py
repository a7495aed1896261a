"""Logs of NCCL's watchdogs: who gave up on what, and who had not issued it; or undecided."""

from __future__ import annotations

from pathlib import Path

import pytest
from collective_cases import diagnosed_log

from ddp_notebook import __main__
from ddp_notebook.jobs.target import Left
from ddp_notebook.jobs.verdict import Outcome

PG = "PG ID 0 PG GUID 0(default_pg)"
BEGAN = "[E416 20:40:12.98 ProcessGroupNCCL.cpp:632]"


def gave_up(rank: int, at: int, work: str, number: int | None = None) -> str:
    """`rank` timed out; `number` is the one that its process has in the group."""
    own = rank if number is None else number
    return (
        f"[rank{rank}]:{BEGAN} [Rank {own}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={at}, OpType={work}, NumelOut=8, Timeout(ms)=600000) ran for 600000 "
        "milliseconds before timing out.\n"
    )


def reached(rank: int, issued: int, done: int, group: str = PG) -> str:
    """How far `rank` had come, as newer torch writes it."""
    return (
        f"[rank{rank}]:{BEGAN} [{group} Rank {rank}]  failure detected by watchdog at work "
        f"sequence id: {done + 1} PG status: last enqueued work: {issued}, "
        f"last completed work: {done}\n"
    )


def told(rank: int, issued: int, done: int) -> str:
    """What a rank writes that another one has told of its timeout."""
    return (
        f"[rank{rank}]:{BEGAN} [{PG} Rank {rank}] Received a dump signal due to a collective "
        f"timeout from  rank 3 and we will try our best to dump the debug info. "
        f"Last enqueued NCCL work: {issued}, last completed NCCL work: {done}.This is\n"
    )


def cause(folder: Path, text: str) -> str:
    """Of the only finding, which names nobody."""
    (finding,) = diagnosed_log(folder, text).findings
    assert (finding.category.value, finding.ranks) == ("undecided", ())
    return finding.cause


ALL_REDUCE, BROADCAST = "ALLREDUCE, NumelIn=1024", "BROADCAST, NumelIn=8"


def test_who_had_not_issued_what_the_others_waited_in_is_a_fact_and_no_verdict(
    tmp_path: Path,
) -> None:
    waited = "".join(gave_up(rank, 8, ALL_REDUCE) + reached(rank, 10, 7) for rank in (0, 2, 3))

    words = cause(tmp_path, waited + told(1, 7, 7))

    assert "Ranks 0,2-3 timed out in ALLREDUCE of 1,024 elements (SeqNum=8)" in words
    assert "which rank 1 had not issued by then (the last of rank 1 was 7)" in words
    unseen = cause(tmp_path, waited + told(1, -1, -1))
    assert "had not issued" not in unseen, "its watchdog had seen nothing at all"


def test_marks_of_schedulers_before_torchs_own_are_read_past(tmp_path: Path) -> None:
    lines = (gave_up(0, 5, BROADCAST) + gave_up(1, 5, ALL_REDUCE)).splitlines(keepends=True)

    for mark in (
        "(WorkerDict pid=63294) ",
        "[80746] ",
        "node-7 [stderr] ",
        "12:00:03.5Z stderr F ",
    ):
        words = cause(tmp_path, "".join(mark + line for line in lines))
        assert "Rank 0 timed out in BROADCAST" in words and "rank 1 timed out in ALLRED" in words


def test_time_outs_of_groups_that_the_log_does_not_name_are_not_joined(tmp_path: Path) -> None:
    unmarked = "".join(
        gave_up(rank, at, "ALLREDUCE").partition(":")[2] for rank, at in ((0, 96), (0, 97), (7, 64))
    )
    assert "does not tell in which of several groups" in cause(tmp_path, unmarked)
    # The number behind the mark counts in the group: these are ranks 4 and 5.
    in_group = gave_up(4, 3, "ALLREDUCE", 0) + gave_up(5, 3, "ALLREDUCE", 1)
    assert "Ranks 4-5 timed out" in cause(tmp_path, in_group)


def test_a_log_of_a_job_that_was_ended_from_outside_is_undecided_and_no_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "job.log"
    log.write_text(
        "W api.py:753] Received 15 death signal, shutting down workers\n"
        "W api.py:1028] Sending process 553 closing signal SIGTERM\n"
        "W api.py:1028] Sending process 554 closing signal SIGTERM\n"
    )

    assert __main__.main(["why", str(log)]) == Outcome.UNDECIDED.value
    assert "2 processes still ran when torchrun ended them" in capsys.readouterr().out
    assert __main__.main(["save", str(log), str(tmp_path / "saved.json")]) == 3


def test_what_was_saved_of_a_job_says_what_was_found_in_it(tmp_path: Path) -> None:
    log, saved = tmp_path / "job.log", tmp_path / "saved.json"
    log.write_text(gave_up(0, 8, ALL_REDUCE) + reached(0, 10, 7) + told(1, 7, 7))

    assert __main__.main(["save", str(log), str(saved)]) == 0

    first, again = Left([log]).why(), Left([saved]).why()
    assert again.diagnosis.findings == first.diagnosis.findings
    assert again.outcome is first.outcome is Outcome.UNDECIDED
