"""A job that no notebook started, taken over: it stops at lines, and goes on when it is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import eventually, with_entry_point

from ddp_notebook.errors import UsageMistake
from ddp_notebook.jobs import prepared
from ddp_notebook.jobs.prepared import Job
from ddp_notebook.launch.addresses import free_port
from ddp_notebook.model import StepTable
from ddp_notebook.rank.prepared import job_folder

ROOT = Path(__file__).parents[2]
WITHIN_S = 60.0
SCRIPT = """\
import sys, time
import torch, torch.distributed as dist
import scales

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), sys.argv[1]
asked = ""

def one_step(step):
    loss = torch.ones(1) * (rank + 1)
    if rank == 1:
        loss = loss * scales.factor(step)
    dist.all_reduce(loss)
    return loss

def main():
    global asked
    step = 0
    while asked != "end":
        loss = one_step(step)
        step += 1
        if rank == 0:
            asked = open(f"{folder}/asked").read()
        said = [asked]
        dist.broadcast_object_list(said, 0)
        asked = said[0]
        if asked == "breakpoint":
            breakpoint()
        if asked == "raise":
            raise ValueError(f"asked on rank {rank}")
        time.sleep(0.005)
    print("ended", rank, float(loss))

main()
"""
SCALES = "def factor(step):\n    half = 0.5\n    return half\n"
CONTROLLER = """\
import sys
from ddp_notebook.jobs.attachment import Attachment
from ddp_notebook.rank.calls import Breakpoint
from ddp_notebook.session.tools.debugger.of_job import JobDebugger
attachment = Attachment()
attachment.attach(sys.argv[1:], take_over=True)
debugger = JobDebugger(attachment.taken_over)
debugger.breakpoints.add("one_step", Breakpoint(0))
print(debugger.wait(60, lambda: False).title, flush=True)
sys.stdin.read()
"""


class Started:
    """Two ranks of the script; `ask` is what they read in each of their steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "train.py").write_text(SCRIPT)
        (folder / "scales.py").write_text(SCALES)
        self.ask("")
        environment = {
            **os.environ,
            "DDP_NOTEBOOK": "1",
            "PYTHONPATH": f"{ROOT}:{with_entry_point(folder)}",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port("127.0.0.1")),
            "WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
        }
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "train.py", str(folder)],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        self.pid = self.ranks[0].pid
        eventually(self._runs, 120)

    def _runs(self) -> Job | None:
        try:
            job = prepared.job_of(self.pid)
        except UsageMistake:
            return None
        logs = [process.log(rank, 1).records for rank, process in job.processes.items()]
        return job if len(logs) == 2 and all(of and of[0].number > 9 for of in logs) else None

    def ask(self, what: str) -> None:
        beside = self.folder / "asked.new"
        beside.write_text(what)
        beside.replace(self.folder / "asked")

    def issued(self) -> list[int]:
        """How many collectives each rank has issued."""
        of = prepared.job_of(self.pid).processes.items()
        return [process.log(rank, 1).records[-1].number for rank, process in of]

    def goes_on(self) -> bool:
        before = self.issued()
        return bool(
            eventually(
                lambda: all(b > a + 20 for a, b in zip(before, self.issued(), strict=True)), 60
            )
        )

    def end(self) -> list[tuple[str, str]]:
        """What each rank has printed, and its errors."""
        self.ask("end")
        return [rank.communicate(timeout=WITHIN_S) for rank in self.ranks]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    # A socket's path is short.
    monkeypatch.setenv(job_folder.FOLDER_VARIABLE, f"/tmp/ddpnb-lines-{os.getpid()}")
    started = Started(tmp_path)
    yield started
    for rank in started.ranks:
        rank.kill()
        rank.communicate()
    subprocess.run(["rm", "-rf", str(job_folder.root())], check=True)


class Notebook:
    """What a user types, and sees."""

    def __init__(self, shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
        self._shell, self._capsys = shell, capsys

    def said(self, source: str, *, ok: bool = True) -> str:
        self._capsys.readouterr()
        assert self._shell.run_cell(source).success is ok, source
        shown = self._capsys.readouterr()
        return shown.out + shown.err

    def table(self, line: str) -> StepTable:
        """The table that a line of magic returns."""
        self.said(f"table = {line}")
        table: StepTable = self._shell.user_ns["table"]
        return table

    def both_at_the_line(self) -> StepTable:
        """One of the ranks may have passed the line when its breakpoint came."""
        table = self.table("%ddp_wait --timeout 60")
        return table if len(table.rows) == 1 else self.table("%ddp_step --to end")


def at(table: StepTable) -> dict[tuple[int, ...], str]:
    return {row.ranks: row.text for row in table.rows}


@pytest.fixture
def notebook(shell: Any, capsys: pytest.CaptureFixture[str]) -> Notebook:
    return Notebook(shell, capsys)


def test_a_job_stops_at_lines_is_stepped_asked_and_given_back(
    job: Started, notebook: Notebook
) -> None:
    said = notebook.said
    said(f"%ddp_attach {job.pid}")
    for verb in ("abort", "step", "break 3", "print step"):
        shown = said(f"%ddp_{verb}", ok=False)
        assert f"job {job.pid} (train.py), which is attached, is only looked at" in shown
        assert shown.rstrip().endswith(f": %ddp_attach {job.pid} --take-over")
    assert "%ddp_vars needs ranks" in said("%ddp_vars", ok=False)
    assert "breakpoint() in its code" in said(f"%ddp_attach {job.pid} --take-over")
    assert job.goes_on()
    assert "There is no file nowhere.py" in said("%ddp_break nowhere.py:3", ok=False)
    assert "has no line 99" in said("%ddp_break train.py:99", ok=False)

    # In a function that is called again and again; its file is named as the job would.
    assert "train.py:11" in said("%ddp_break train.py:11")
    first = notebook.both_at_the_line()
    assert at(first)[(0, 1)].startswith("train.py:11, in one_step: if rank == 1:")
    said("%ddp_break --clear")
    parted = notebook.table("%ddp_step --ranks 1")
    assert "train.py:12" in at(parted)[(1,)]
    inside = notebook.table("%ddp_step --ranks 1 --into")
    assert "scales.py:2, in factor: half = 0.5" in at(inside)[(1,)]
    out = notebook.table("%ddp_step --ranks 1 --out")
    assert "train.py:12" in at(out)[(1,)] or "train.py:13" in at(out)[(1,)]
    assert "(1, 'x')" in said("value = %ddp_print --ranks 1 (rank, 'x')\nprint(value)")
    assert "main" in said("%ddp_frame --ranks 1")

    # It computes with what was assigned; a function of a module, with a condition.
    assert "step = 1000000" in said("%ddp_set --ranks 1 --up 1 step = 1000000")
    said('%ddp_break scales.factor --if "step > 1000000" --ranks 1')
    there = notebook.table("%ddp_step --to end")
    assert "scales.py:2" in at(there)[(1,)]
    assert at(there)[(0,)].startswith("all_reduce"), "who waits for it is shown as waiting"
    assert "half = 8.0 → rank 1" in said("%ddp_set --ranks 1 half = 8.0")
    assert "scales.py:3" in at(notebook.table("%ddp_step --ranks 1"))[(1,)]
    assert "none is paused; rank 1 can be stepped" in said("%ddp_step --ranks 0", ok=False)
    assert "1 hit" in said("%ddp_break")

    assert "given back" in said("%ddp_detach")
    assert job.goes_on(), "without a breakpoint"
    assert [error for _, error in job.end()] == ["", ""]


def test_what_acts_on_the_sessions_ranks_says_so_while_a_job_is_only_looked_at(
    job: Started, notebook: Notebook
) -> None:
    said = notebook.said
    said("%ddp_init -n 1 --device cpu")
    said(f"%ddp_attach {job.pid}")
    whose = f"the session's own ranks: job {job.pid} (train.py) is only looked at. To stop, step"
    for call, ok in (("%ddp_abort", True), ("%ddp_step", False), ("%ddp_break 3 --log x", False)):
        shown = said(call, ok=ok)
        assert whose in shown and f"%ddp_attach {job.pid} --take-over\n" in shown
    assert whose not in said("%ddp_why") + said("%ddp_step -h") + said("%ddp_vars")
    said("%ddp_detach")
    assert whose not in said("%ddp_abort")


def test_breakpoint_and_an_error_stop_a_job_and_leaving_it_lets_it_go_on(
    job: Started, notebook: Notebook
) -> None:
    notebook.said(f"%ddp_attach {job.pid} --take-over")
    job.ask("breakpoint")
    both = notebook.both_at_the_line()
    assert at(both)[(0, 1)].endswith("in main: breakpoint()")
    job.ask("raise")
    notebook.said("%ddp_break --on exception")
    raised = notebook.table("%ddp_step --to end")
    assert "(raised ValueError)" in at(raised)[(0, 1)]
    assert "(0, 'raise')" in notebook.said("value = %ddp_print (rank, asked)\nprint(value)")
    notebook.said("%ddp_detach")
    errors = [rank.communicate(timeout=WITHIN_S)[1] for rank in job.ranks]
    assert all(f"ValueError: asked on rank {rank}" in e for rank, e in enumerate(errors)), errors


def test_a_notebook_that_is_killed_leaves_no_rank_at_a_line(job: Started) -> None:
    command = [sys.executable, "-c", CONTROLLER, str(job.pid)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert "train.py:10" in other.stdout.readline()
        other.kill()
    assert job.goes_on(), "as if nobody had taken it over"
    began_s = time.monotonic()
    assert [error for _, error in job.end()] == ["", ""]
    assert time.monotonic() - began_s < WITHIN_S
