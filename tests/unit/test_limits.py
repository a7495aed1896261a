"""Limits of open files and processes are told before, or when, ranks cannot start."""

from __future__ import annotations

import errno
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ddp_notebook.errors import SessionLost, UsageMistake
from ddp_notebook.launch.out_of_memory import bytes_left
from ddp_notebook.session.setup import limits
from ddp_notebook.session.setup.limits import (
    RANK_BYTES,
    warning,
    why_no_room,
    why_too_few_files,
    why_too_few_processes,
    why_too_little_memory,
)
from ddp_notebook.session.setup.messages import why_not_started

AMPLE = 200 * RANK_BYTES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits are told on Linux")


def status(proc: Path, name: str, uid: int, threads: int, capabilities: int = 0) -> None:
    (proc / name).mkdir()
    text = f"Name:\tx: y\nUid:\t{uid}\t{uid}\nThreads:\t{threads}\nCapEff:\t{capabilities:016x}\n"
    (proc / name / "status").write_text(text)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("resource.getrlimit", lambda which: (100, 4096))
    yield


@pytest.mark.usefixtures("limit")
def test_too_few_processes_are_said_before_anything_starts(tmp_path: Path) -> None:
    status(tmp_path, "self", 1000, 16)
    status(tmp_path, "7", 1000, 50)
    status(tmp_path, "8", 1001, 500)
    (tmp_path / "9").mkdir()  # it has ended meanwhile
    assert why_too_few_processes(1, tmp_path) == ""
    said = why_too_few_processes(4, tmp_path)
    assert "may have 100 processes and threads (ulimit -u), and has 50: 4 ranks need about" in said


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize(
    ("used", "starts", "fits"),
    [
        (95, {"ranks": 0}, False),  # a restart: the notebook's own process met the limit
        (80, {"ranks": 0}, True),
        (80, {"ranks": 1}, False),
        (80, {"in_script": 2}, False),
        (60, {"in_script": 2}, True),
        (98, {"editors": 1}, False),
        (95, {"editors": 1}, True),
    ],
)
def test_too_few_processes_are_said_before_more_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: int, starts: dict[str, int], fits: bool
) -> None:
    status(tmp_path, "self", 1000, 16)
    status(tmp_path, "7", 1000, used)
    monkeypatch.setattr(limits, "PROC", tmp_path)
    if fits:
        limits.check_processes("%ddp_restart", **starts)
        return
    with pytest.raises(UsageMistake, match=f"and has {used}: %ddp_restart needs about .* more"):
        limits.check_processes("%ddp_restart", **starts)


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize(("uid", "capabilities"), [(0, 0), (1000, 1 << 24), (1000, 1 << 21)])
def test_whom_the_limit_does_not_bind_is_let_be(
    tmp_path: Path, uid: int, capabilities: int
) -> None:
    status(tmp_path, "self", uid, 16, capabilities)
    status(tmp_path, "7", uid, 99)
    assert why_too_few_processes(4, tmp_path) == ""


def test_without_proc_nothing_is_said(tmp_path: Path) -> None:
    assert why_too_few_processes(4, tmp_path) == ""


def test_a_full_disk_is_named_where_nothing_could_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert why_no_room() == ""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=4096))
    said = why_not_started(SessionLost("The controller (pid 7) ended, exited with code 0."))
    assert f"\nNo room is left in {tempfile.gettempdir()} (4 KiB), and a session needs" in said
    assert said.endswith("Nothing is left running. Try again with %ddp_init.")
    monkeypatch.undo()
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_files=12, f_favail=11))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 30))
    assert "(11 more files), and a session needs files" in why_no_room()
    monkeypatch.undo()
    monkeypatch.setattr("resource.getrlimit", lambda _: (512, 512))
    assert "No file may grow beyond 512 B here (ulimit -f)" in why_no_room()
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", "/gone")
    assert why_no_room() == "", "a folder that is gone is no full disk"


@pytest.mark.usefixtures("limit")
def test_too_few_open_files_are_said_for_what_they_are() -> None:
    said = why_too_few_files(OSError(errno.EMFILE, "Too many open files"))
    assert "may have 100 files and sockets open (ulimit -n)" in said
    assert "(4096, 4096)" in said
    assert why_too_few_files(OSError(errno.ENOENT, "no")) == ""
    assert why_too_few_files(RuntimeError()) == ""


@pytest.mark.parametrize(
    ("soft", "hard", "says"),
    [
        (64, 4096, "2 ranks need 94. In the shell that starts Jupyter: ulimit -n 94"),
        (64, 80, "Ask the administrator"),
        (94, 94, ""),
        (-1, -1, ""),
    ],
)
def test_a_limit_of_open_files_is_told_before_the_controller_meets_it(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, says: str
) -> None:
    """It aborted there, without a word."""
    monkeypatch.setattr("resource.getrlimit", lambda which: (soft, hard))
    said = limits.why_too_low_for_files(2)
    assert (says in said) if says else said == ""


def test_more_ranks_than_fit_are_warned_of_with_what_fits_and_what_to_type() -> None:
    said = warning(100, 2, AMPLE)
    assert "100 ranks take turns on 2 CPU cores: starting them takes long" in said
    assert said.endswith("interrupt the start (Ctrl-C; in a notebook I, I).\n"
                         "What fits: %ddp_init --world-size 16")  # fmt: skip
    said = warning(100, 2, 5 * RANK_BYTES)
    assert "about 300 MiB. Where memory runs out" in said and said.endswith("--world-size 5")
    said = warning(4, 8, AMPLE, ("0", "1"))
    assert said.startswith("4 ranks share 2 GPUs and the memory there, by gloo: NCCL")
    assert said.endswith("What fits: %ddp_init --world-size 2 --device cuda")


@pytest.mark.parametrize("left", [None, AMPLE])
def test_ranks_that_fit_are_started_without_a_word(left: int | None) -> None:
    assert warning(4, 1, left) == warning(16, 2, left) == warning(2, 2, left, ("0", "3")) == ""


def test_ranks_that_cannot_fit_into_memory_are_refused() -> None:
    assert why_too_little_memory(4, None) == why_too_little_memory(4, 300 * 2**20) == ""
    said = why_too_little_memory(100, 1000 * 2**20)
    assert said.startswith("100 ranks do not fit into memory: 1000 MiB are left, and each takes")
    assert said.endswith("or type: %ddp_init --world-size 3")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 500 kB of memory left, and 100 kB of swap."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=500_000))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=100_000))


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.mark.usefixtures("memory")
def test_the_tightest_limit_of_a_control_group_and_those_around_it_counts(tmp_path: Path) -> None:
    membership, root = tmp_path / "cgroup", tmp_path / "fs"
    assert bytes_left(root, membership) == 600_000
    membership.write_text("0::/user/job\n")
    write(root / "user/job", memory__max="max\n", memory__current="7\n", memory__stat="anon 7\n")
    assert bytes_left(root, membership) == 600_000
    (root / "user/memory.max").write_text("1000\n")
    (root / "user/memory.current").write_text("900\n")
    (root / "user/memory.stat").write_text("anon 400\ninactive_file 500\n")
    assert bytes_left(root, membership) == 600
    (root / "user/memory.current").write_text("1700\n")
    assert bytes_left(root, membership) == 0


@pytest.mark.usefixtures("memory")
def test_limits_of_version_1_are_read_too(tmp_path: Path) -> None:
    membership, root = tmp_path / "cgroup", tmp_path / "fs"
    membership.write_text("8:pids:/\n4:cpu,memory:/docker/ab\n0::/\n")
    write(
        root / "memory",  # in a container its own folder is the mount
        memory__limit_in_bytes="2000\n",
        memory__usage_in_bytes="1500\n",
        memory__stat="inactive_file 1\ntotal_inactive_file 300\n",
    )
    assert bytes_left(root, membership) == 800
    (root / "memory/memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")
    assert bytes_left(root, membership) == 600_000
