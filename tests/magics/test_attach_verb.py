"""`%ddp_attach` and `%ddp_detach` in a real shell: what a dead job left, and wrong input."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support import shared_shell

from ddp_notebook.jobs import find, outside
from ddp_notebook.model import StackTree
from ddp_notebook.rank.prepared import job_folder

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def no_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of others on this machine are not seen."""
    monkeypatch.setenv(job_folder.FOLDER_VARIABLE, str(tmp_path / "jobs"))
    monkeypatch.setattr(outside, "jobs", lambda prepared: [])


def run(shell: Any, capsys: Capture, source: str) -> tuple[Any, str]:
    """The result of a cell, and what it shows."""
    capsys.readouterr()
    result = shell.run_cell(source)
    shown = capsys.readouterr()
    text = (shown.out + shown.err).strip()
    assert "Traceback (most recent" not in text
    return result, text


def raised(folder: Path) -> Path:
    """The log of a job of which rank 1 raised."""
    (folder / "logs").mkdir()
    lines = (
        "Traceback (most recent call last):",
        '  File "/home/me/train.py", line 5, in <module>',
        "    rows = load()",
        "ValueError: no rows left",
    )
    (folder / "logs" / "job.log").write_text("".join(f"[rank1]: {line}\n" for line in lines))
    return folder / "logs"


def test_a_dead_job_is_read_without_a_session_and_left_again(
    shell: Any, capsys: Capture, tmp_path: Path
) -> None:
    logs = raised(tmp_path)
    _, shown = run(shell, capsys, f"%ddp_attach '{logs}'")
    assert shown.startswith(f"Attached to what a job left in {logs}: logs of rank 1.")

    result, shown = run(shell, capsys, "%ddp_why")
    assert shown.startswith(f"Of what a job left in {logs}: logs of rank 1. This stands on: logs")
    assert "ValueError: no rows left at train.py, line 5" in shown
    assert "%ddp" not in shown.replace("%ddp_why --explain", ""), "no magic acts on it"
    assert shown.count("✗") == 1
    _, assigned = run(shell, capsys, "diagnosis = %ddp_why")
    assert "ValueError: no rows left at train.py, line 5" in assigned, "not only what it stands on"
    assert result.result.findings[0].ranks == (1,)
    _, explained = run(shell, capsys, "%ddp_why --explain")
    assert explained.startswith(
        f"{shell.user_ns['diagnosis'].findings[0].category}\n\nWhat torch prints"
    )
    wire = json.loads(run(shell, capsys, "%ddp_why --json")[1])
    assert (wire["job"], wire["verdict"]) == (f"what a job left in {logs}", "finding")
    result, shown = run(shell, capsys, "%ddp_where --ranks 1")
    assert isinstance(result.result, StackTree)
    assert shown.startswith(f"Of what a job left in {logs}")
    assert "train.py, line 5" in shown
    _, shown = run(shell, capsys, "%ddp_board")
    assert "no rows left" in shown
    for call, expected in (
        ("%ddp_where --locals", "--locals needs ranks that can be asked"),
        (
            "%ddp_abort",
            "%ddp_abort needs ranks, and none are running. Start them first: %ddp_init "
            "--world-size 4. Only %ddp_why, %ddp_where and %ddp_board look at what a job left in",
        ),
        ("%ddp_where --ranks 2", "Rank 2 does not exist: world size is 2"),
        ("%ddp_where --ranks x", "'x' is not a set of ranks"),
        ("%ddp_attach /does/not/exist", "/does/not/exist does not exist."),
    ):
        result, shown = run(shell, capsys, call)
        assert not result.success
        assert shown.startswith(f"UsageError: {expected}"), shown
    _, shown = run(shell, capsys, "%ddp_attach")
    assert shown.endswith(f"Attached to what a job left in {logs}."), "a mistake changes nothing"

    _, shown = run(shell, capsys, "%ddp_save run.json")
    assert shown.startswith(
        "UsageError: %ddp_save saves the session's own run, and this session has no ranks. Of "
    )
    assert shown.endswith("in a shell: ddp-notebook save PID_OR_FILES run.json")
    _, shown = run(shell, capsys, "%ddp_detach")
    assert shown.startswith(f"Detached from what a job left in {logs}.")
    _, shown = run(shell, capsys, "%ddp_why")
    assert shown.startswith("UsageError: %ddp_why needs ranks, and none are running.")


def test_a_sessions_own_ranks_are_left_alone(capsys: Capture, tmp_path: Path) -> None:
    logs = raised(tmp_path)
    with shared_shell(2) as shell:
        run(shell, capsys, f"%ddp_attach '{logs}'")
        assert "no rows left" in run(shell, capsys, "%ddp_why")[1]
        assert "4" in run(shell, capsys, "%%ddp --ranks 0\n2 + 2")[1]
        saved = run(shell, capsys, f"%ddp_save '{tmp_path / 'run.json'}'")[1]
        assert "It is the session's own run. Of what a job left" in saved
        assert "in a shell: ddp-notebook save PID_OR_FILES" in saved
        run(shell, capsys, "%ddp_detach")
        assert "No problem found" in run(shell, capsys, "%ddp_why")[1]
        assert run(shell, capsys, "%ddp_where")[1].endswith("ranks 0 and 1  idle")


WRONG = (
    ("%ddp_detach", "No job is attached. Which there are: %ddp_attach"),
    ("%ddp_attach 4194305", "There is no process 4194305 here."),
    (f"%ddp_attach {os.getpid()}", f"Process {os.getpid()} is not prepared"),
    ("%ddp_attach 1 2", "Name one pid, or files of one job."),
    ("%ddp_attach gpu07:12345", "gpu07 cannot be asked: no-ssh is not installed here."),
    ("%ddp_attach gpu07:", "gpu07 cannot be asked"),
    ("%ddp_attach gpu07:1 gpu07:2", "Name a job on other hosts by one HOST:PID for each"),
    ("%ddp_attach 'gpu 7:1'", "gpu 7:1 does not exist."),
    ("%ddp_attach --slurm x", "'x' is not the number of a Slurm job"),
    ("%ddp_attach --slurm 3 7", "Give --slurm or a job, not both."),
    ("%ddp_attach trace_rank_0", "No files of a job found"),
    ("%ddp_attach run.json", "run.json is damaged, and cannot be replayed"),
    ("%ddp_attach notes.md", "No files of a job found"),
)


def test_wrong_input_is_told_what_to_type(
    shell: Any, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DDP_NOTEBOOK_SSH", "no-ssh")
    # Which other tests ran here decides whether torch is loaded, and what was started.
    monkeypatch.setattr(find, "untold", lambda pid: ())
    monkeypatch.setattr(find, "has_torch", lambda pid: True)
    (tmp_path / "trace_rank_0").write_bytes(b"\x80\x02}half")
    saved = b'{"traceEvents": [], "ddp_notebook": {"format": "ddp_notebook run", "ver'
    (tmp_path / "run.json").write_bytes(saved)
    (tmp_path / "notes.md").write_bytes(b"hello")
    for call, expected in WRONG:
        result, shown = run(shell, capsys, call)
        assert not result.success
        assert shown.startswith(f"UsageError: {expected}"), shown
    assert "No job of yours on this host was prepared" in run(shell, capsys, "%ddp_attach")[1]
