"""Limits of open files and processes are told before, or when, ranks cannot start."""

from __future__ import annotations

import errno
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ddp_notebook.errors import SessionLost, UsageMistake
from ddp_notebook.launch.out_of_memory import bytes_left
from ddp_notebook.session import InitOptions, preflight
from ddp_notebook.session.preflight import (
    RANK_BYTES,
    check_processes,
    check_start,
    why_no_room,
    why_not_started,
)

AMPLE = 200 * RANK_BYTES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits are told on Linux")


def status(proc: Path, name: str, uid: int, threads: int) -> None:
    (proc / name).mkdir()
    text = f"Name:\tx: y\nUid:\t{uid}\t{uid}\nThreads:\t{threads}\n"
    (proc / name / "status").write_text(text)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    limits = {resource.RLIMIT_NPROC: (100, 4096), resource.RLIMIT_NOFILE: (100, 4096)}
    monkeypatch.setattr("resource.getrlimit", lambda which: limits[which])
    yield


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(preflight, "PROC", tmp_path)
    return tmp_path


@pytest.mark.usefixtures("limit")
def test_too_few_processes_are_said_before_anything_starts(proc: Path) -> None:
    status(proc, "self", 1000, 16)
    status(proc, "7", 1000, 50)
    status(proc, "8", 1001, 500)
    (proc / "9").mkdir()  # it has ended meanwhile
    check_start(1)
    has = r"may have 100 processes and threads \(ulimit -u\), and has 50: 2 ranks need about"
    with pytest.raises(UsageMistake, match=has):
        check_start(2)


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize(
    ("used", "starts", "fits"),
    [
        (95, {"ranks": 0}, False),  # a restart: the notebook's own process met the limit
        (80, {"ranks": 0}, True),
        (80, {"ranks": 1}, False),
        (80, {"in_script": 2}, False),
        (60, {"in_script": 2}, True),
    ],
)
def test_too_few_processes_are_said_before_more_are_started(
    proc: Path, used: int, starts: dict[str, int], fits: bool
) -> None:
    status(proc, "self", 1000, 16)
    status(proc, "7", 1000, used)
    if fits:
        check_processes("%ddp_restart", **starts)
        return
    with pytest.raises(UsageMistake, match=f"and has {used}: %ddp_restart needs about .* more"):
        check_processes("%ddp_restart", **starts)


@pytest.mark.usefixtures("limit")
def test_root_whom_the_limit_does_not_bind_is_let_be(proc: Path) -> None:
    status(proc, "self", 0, 16)
    status(proc, "7", 0, 99)
    check_processes("%ddp_restart", ranks=4)


@pytest.mark.usefixtures("limit", "proc")
def test_without_proc_nothing_is_said() -> None:
    check_processes("%ddp_restart", ranks=4)


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
def test_too_few_open_files_are_said_for_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "why_no_room", lambda: "")
    said = why_not_started(OSError(errno.EMFILE, "Too many open files"))
    assert "may have 100 files and sockets open (ulimit -n)" in said
    assert "(4096, 4096)" in said
    for error in (OSError(errno.ENOENT, "no"), RuntimeError()):
        assert "ulimit -n" not in why_not_started(error)


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
    if not says:
        check_start(2)
        return
    with pytest.raises(UsageMistake, match=says):
        check_start(2)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A machine of so many cores, with so much memory left."""

    def be(cores: int, left_bytes: int | None) -> None:
        monkeypatch.setattr(preflight, "cores", lambda: cores)
        monkeypatch.setattr(preflight.out_of_memory, "bytes_left", lambda: left_bytes)

    return be


def warning(world_size: int) -> str:
    return preflight.warning(InitOptions(world_size=world_size))


def test_more_ranks_than_fit_are_warned_of_with_what_fits_and_what_to_type(
    machine: Callable[..., None],
) -> None:
    machine(2, AMPLE)
    said = warning(100)
    assert "100 ranks take turns on 2 CPU cores: starting them takes long" in said
    assert said.endswith("interrupt the start (Ctrl-C; in a notebook I, I).\n"
                         "What fits: %ddp_init --world-size 16")  # fmt: skip
    machine(2, 5 * RANK_BYTES)
    said = warning(100)
    assert "about 300 MiB. Where memory runs out" in said and said.endswith("--world-size 5")


@pytest.mark.parametrize("left", [None, AMPLE])
def test_ranks_that_fit_are_started_without_a_word(
    left: int | None, machine: Callable[..., None]
) -> None:
    machine(1, left)
    assert warning(4) == ""
    machine(2, left)
    assert warning(16) == ""


def test_ranks_that_cannot_fit_into_memory_are_refused(machine: Callable[..., None]) -> None:
    for left_bytes in (None, 300 * 2**20):
        machine(2, left_bytes)
        check_start(4)
    machine(2, 1000 * 2**20)
    with pytest.raises(UsageMistake) as refused:
        check_start(100)
    said = str(refused.value)
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
