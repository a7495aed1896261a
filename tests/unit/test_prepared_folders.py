"""What prepared ranks leave: who may read it, what is kept, and what is no such thing."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_notebook.errors import UsageMistake
from ddp_notebook.jobs import prepared
from ddp_notebook.rank.prepared import job_folder
from ddp_notebook.rank.prepared.job_folder import About


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for prepared processes."""
    monkeypatch.setenv(job_folder.FOLDER_VARIABLE, str(tmp_path / "jobs"))
    return tmp_path / "jobs"


def about(rank: int = 0, pid: int = 2**22 + 1, wall_s: float = 1.0, parent: int = 7) -> About:
    """A process that is no more."""
    return About(
        pid, 5, parent, 3, rank, 2, 0, "/home/me/train.py", "/home/me", "here",
        job_folder.namespace(), wall_s,
    )  # fmt: skip


def test_a_process_is_found_again_with_its_rank_and_job() -> None:
    alive = dataclasses.replace(about(1), pid=os.getpid(), began=job_folder.began(os.getpid()))
    for each in (about(0), alive):
        assert job_folder.make(each) is not None

    (job,) = prepared.jobs()

    assert job.alive == (1,)
    assert prepared.job_of(os.getpid()).first == about(0)
    assert prepared.job_of(7) == job, "its launcher names it too"


def test_jobs_that_one_shell_started_one_after_the_other_are_told_apart() -> None:
    for number in range(2):
        job_folder.make(about(0, pid=2**22 + number, wall_s=float(number)))

    assert [len(job.processes) for job in prepared.jobs()] == [1, 1]


def test_the_newest_jobs_are_kept() -> None:
    for number in range(job_folder.KEPT_JOBS + 3):
        job_folder.make(about(0, pid=2**22 + number, wall_s=float(number), parent=number))

    job_folder.sweep()

    assert [job.first.wall_s for job in prepared.jobs()] == [7.0, 6.0, 5.0, 4.0, 3.0]


def test_a_folder_that_others_can_enter_is_neither_written_nor_read(root: Path) -> None:
    root.mkdir()
    root.chmod(0o755)

    assert job_folder.make(about()) is None
    assert prepared.jobs() == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 3}', '{"version": 2}', "null"])
def test_what_is_half_written_or_of_another_version_is_passed_over(root: Path, text: str) -> None:
    own = job_folder.make(about())
    assert own is not None
    (own / "about.json").write_text(text)

    assert prepared.jobs() == []


@pytest.mark.parametrize(
    ("pid", "why"),
    [(2**22 + 5, "There is no process"), (os.getpid(), "is not prepared")],
    ids=["no process", "this one"],
)
def test_a_pid_that_is_no_prepared_rank_is_told_why(pid: int, why: str) -> None:
    with pytest.raises(UsageMistake, match=why):
        prepared.job_of(pid)


def test_without_the_variable_nothing_of_ours_is_loaded() -> None:
    code = (
        "import sys, time; import contextlib, os\n"
        "began = time.perf_counter()\n"
        "from ddp_notebook import autoload; autoload.load()\n"
        "ours = sorted(name for name in sys.modules if name.startswith('ddp_notebook'))\n"
        "assert ours == ['ddp_notebook', 'ddp_notebook.autoload'], ours"
    )
    environment = {k: v for k, v in os.environ.items() if k != "DDP_NOTEBOOK"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_an_error_of_ours_never_leaves_the_entry_point() -> None:
    """Here torch is not even imported, and cannot be."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from ddp_notebook import autoload; autoload.load()"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "DDP_NOTEBOOK": "1"}
    )
