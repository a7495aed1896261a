"""Cells end when no rank can get on, and only then; and cells held before each collective."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from results import rank_pids
from support import eventually, ipython_shell, session_of, spared

from ddp_notebook.errors import Stuck, UsageMistake
from ddp_notebook.launch.process_groups import is_stopped
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.model import Category, RankReport
from ddp_notebook.rank import calls
from ddp_notebook.session import Session
from ddp_notebook.testing import cluster_of

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def ranks(ranks4: Session) -> Iterator[Session]:
    """Four ranks with a variable to lose, free before and after."""
    ranks4.run_cell("kept = 'kept'").raise_for_error()
    yield ranks4
    if not ranks4.record.snapshot.ready:
        ranks4.abort()


def goes_on(session: Session) -> None:
    """After giving up, the same processes train on with their variables."""
    pids = rank_pids(session)
    session.abort()
    assert rank_pids(session) == pids
    assert session.pull("kept") == dict.fromkeys(range(4), "kept")
    session.run_cell("x = torch.ones(1)\ndist.all_reduce(x)\nassert x == 4").raise_for_error()


HANGS = {
    "a collective that one rank leaves out": (
        "if rank != 2:\n    dist.all_reduce(torch.ones(1))",
        2,
    ),
    "a backward that one rank leaves out": (
        "model = DDP(torch.nn.Linear(3, 1))\n"
        "loss = model(torch.ones(1, 3)).sum()\n"
        "if rank != 1:\n    loss.backward()",
        1,
    ),
    "a work that is waited for": (
        "if rank != 3:\n    work = dist.all_reduce(torch.ones(1), async_op=True)\n    work.wait()",
        3,
    ),
    "two that send to each other": (
        "big = torch.ones(4_000_000)\n"
        "if rank in (0, 1):\n    dist.send(big, 1 - rank)\n    dist.recv(big, 1 - rank)",
        None,
    ),
}


@pytest.mark.parametrize(("source", "missing"), HANGS.values(), ids=HANGS)
def test_a_cell_whose_ranks_wait_for_what_will_not_come_ends_with_the_reason(
    ranks: Session, source: str, missing: int | None
) -> None:
    result = ranks.run_cell(source)
    assert isinstance(result.error, Stuck), result.error
    diagnosis = result.error.diagnosis
    assert diagnosis is not None and diagnosis.wrong
    assert diagnosis.findings[0].category is not Category.UNDECIDED
    if missing is not None:
        assert missing in diagnosis.findings[0].ranks
    goes_on(ranks)


def test_a_rank_that_computes_is_waited_for_however_long_that_takes(ranks: Session) -> None:
    result = ranks.run_cell(
        "import time\n"
        "if rank == 1:\n"
        "    end = time.monotonic() + 4\n"
        "    while time.monotonic() < end:\n"
        "        sum(range(1000))\n"
        "x = torch.ones(1)\n"
        "dist.all_reduce(x)"
    )
    result.raise_for_error()


def test_a_rank_that_computes_in_python_answers_each_time(ranks: Session, tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    source = (
        "import os\n"
        f"while rank == 1 and not os.path.exists({str(enough)!r}):\n"
        "    for _ in range(100):\n"
        "        sorted(range(1000))\n"
        "dist.all_reduce(torch.ones(1))"
    )
    cluster = cluster_of(ranks)
    ranks.run_cell(source, detach=True)
    try:
        for _ in range(10):
            (answer,) = cluster.ask(
                (1,), calls.REPORT, calls.Nothing(), scaled_for_load(1.0)
            ).values()
            assert isinstance(answer, RankReport)
    finally:
        enough.touch()
        ranks.wait()


def test_a_rank_that_sleeps_is_waited_for(ranks: Session) -> None:
    ranks.run_cell(
        "import time\nif rank == 0:\n    time.sleep(4)\ndist.all_reduce(torch.ones(1))"
    ).raise_for_error()


def test_a_cell_goes_on_for_ever_when_that_is_wanted(ranks: Session) -> None:
    """Rank 3 comes to the collective from another cell, which frees the others."""
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.append(
            ranks.run_cell("dist.all_reduce(torch.ones(1))", (0, 1, 2), wait="forever")
        )
    )
    thread.start()

    def waits() -> bool:
        doing = (ranks.why().doing or {}).values()
        return sum("waiting in" in text for text in doing) == 3

    eventually(waits, 10, "three ranks in the all_reduce")
    for _ in range(5):
        ranks.why()
    assert thread.is_alive() and not results
    ranks.abort()
    thread.join(10)
    assert results and results[0].error is not None


# ------------------------------------------------------------------ collective by collective


def test_held_ranks_stand_before_a_collective_until_they_are_stepped(ranks: Session) -> None:
    result = ranks.run_cell(
        "x = torch.ones(2)\ndist.all_reduce(x)\nprint('one')\ndist.barrier()\nprint('two')",
        hold=True,
    )
    assert result.error is None and result.steps is not None
    (row,) = result.steps.rows
    assert (row.ranks, row.state) == ((0, 1, 2, 3), "paused")
    assert row.text.startswith("all_reduce of float32 [2] (8 B), cell ")
    with pytest.raises(UsageMistake, match=r"paused before a collective.*%ddp_step --to end"):
        ranks.run_cell("pass")

    (waiting,) = [row for row in ranks.step((1,)).rows if row.state == "waiting"]
    assert (waiting.ranks, waiting.state, waiting.waits_for) == ((1,), "waiting", (0, 2, 3))
    with pytest.raises(UsageMistake, match="not paused"):
        ranks.step((1,))

    table = ranks.step()
    (row,) = table.rows
    assert (row.ranks, row.state, row.text[:7]) == ((0, 1, 2, 3), "paused", "barrier")
    assert "barrier" in table.link

    (row,) = ranks.step().rows
    assert (row.ranks, row.state) == ((0, 1, 2, 3), "done")
    eventually(lambda: ranks.record.snapshot.ready, 5, "the end of the cell")
    with pytest.raises(UsageMistake, match="finished"):
        ranks.step()


def test_a_rank_that_does_not_answer_is_not_taken_for_one_that_waits(
    ranks2: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits in setup for rank 1, which will come."""
    script = tmp_path / "late.py"
    script.write_text(
        "import os, signal\nimport torch, torch.distributed as dist\n"
        "if os.environ['RANK'] == '1':\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "dist.init_process_group('gloo')\ndist.barrier()\n"
    )
    cluster, answered = cluster_of(ranks2), []
    ask = cluster.ask

    def counted(ranks: Any, question: Any, *more: Any) -> Any:
        answers = ask(ranks, question, *more)
        if question is calls.REPORT and set(ranks) == {0, 1}:
            answered.append(set(answers))
        return answers

    monkeypatch.setattr(cluster, "ask", counted)
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.append(ranks2.run_script(str(script), hold=True)), daemon=True
    )
    thread.start()
    try:
        eventually(lambda: answered.count({0}) >= 4 or results, 30, "looks without rank 1")
    finally:
        os.kill(ranks2.record.snapshot.ranks[1].pid, signal.SIGCONT)  # the script's process
    thread.join(30)
    (result,) = results
    (row,) = result.steps.rows
    assert (row.ranks, row.state) == ((0, 1), "paused"), row
    ranks2.abort()


def test_a_backward_is_seen_bucket_by_bucket(ranks: Session) -> None:
    ranks.run_cell(
        "layers = [torch.nn.Linear(300, 300, bias=False) for _ in range(3)]\n"
        "model = DDP(torch.nn.Sequential(*layers), bucket_cap_mb=0.3)\n"
        "for _ in range(3):\n"
        "    model(torch.ones(1, 300)).sum().backward()",
        hold=True,
    )
    texts = []
    for _ in range(40):
        table = ranks.step(to="all_reduce")
        texts += [row.text for row in table.rows if row.state == "paused"]
        if table.rows[0].state == "done":
            break
    assert any("bucket 1" in text for text in texts), texts
    assert any("bucket 3 of 3 of DDP's backward" in text for text in texts), texts


def test_to_the_end_holds_nobody_any_more(ranks: Session) -> None:
    ranks.run_cell("for _ in range(20):\n    dist.barrier()", hold=True)
    (row,) = ranks.step(to="end").rows
    assert row.state == "done"


def test_held_ranks_are_given_up_and_keep_their_variables(ranks: Session) -> None:
    ranks.run_cell("dist.barrier()", hold=True)
    goes_on(ranks)


def test_the_magic_shows_the_table_and_then_what_was_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ipython_shell() as shell:
        shell.run_line_magic("ddp_init", "--world-size 2 --device cpu")
        with spared(session_of(shell)):
            result = shell.run_cell(
                "%%ddp --step collective\ndist.barrier()\nprint('after the barrier')"
            )
            assert result.success
            assert "Ranks are paused before their next collective." in capsys.readouterr().out
            table = shell.run_line_magic("ddp_step", "")
            assert [row.state for row in table.rows] == ["done"]
            assert "after the barrier" in capsys.readouterr().out


def test_a_rank_whose_process_is_stopped_is_named_at_once(ranks2: Session) -> None:
    ranks2.run_cell("import os, signal").raise_for_error()
    pid = ranks2.record.snapshot.ranks[1].pid
    result = ranks2.run_cell(
        "if rank == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\ndist.barrier()"
    )
    assert isinstance(result.error, Stuck) and result.diagnosis is not None
    finding = result.diagnosis.findings[0]
    assert (finding.ranks, finding.passing) == ((1,), False)
    assert finding.cause.startswith("Rank 1 is stopped")
    assert f"`kill -CONT {pid}` in a shell" in finding.remedy
    ranks2.abort()
    assert ranks2.record.snapshot.ranks[1].pid != pid, "a stopped process frees nobody"
    ranks2.run_cell("x = torch.ones(1)\ndist.all_reduce(x)\nassert x == 2").raise_for_error()


def test_a_rank_that_was_stopped_with_nothing_to_do_gets_a_new_process(ranks2: Session) -> None:
    pid = ranks2.record.snapshot.ranks[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: is_stopped(pid))  # a signal arrives when it arrives
    ranks2.abort()
    assert ranks2.record.snapshot.ranks[1].pid != pid
    ranks2.run_cell("x = torch.ones(1)\ndist.all_reduce(x)\nassert x == 2").raise_for_error()
