"""The doctor's checks of the machine, with facts given, and the limits of containers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from doctor_cases import FAILURE, GIB, MIB, OK, WARNING, expect, write

from ddp_notebook.doctor.facts import container_processes
from ddp_notebook.doctor.machine import (
    EarlierRank,
    Folder,
    check_address_space,
    check_cores,
    check_earlier_ranks,
    check_fork,
    check_memory,
    check_open_files,
    check_processes,
    check_shared_memory,
    check_temporary_folder,
    threads_of,
)
from ddp_notebook.launch.out_of_memory import Limit, container_memory
from ddp_notebook.model.doctor import Verdict


@pytest.mark.parametrize(
    ("available", "limit", "verdict", "found", "remedy"),
    [
        (8 * GIB, None, OK, "8 GiB available", ""),
        (8 * GIB, Limit(64 * GIB, 0), OK, "8 GiB available", ""),
        (8 * GIB, Limit(4 * GIB, GIB), OK, "3 GiB left of the container's 4 GiB", ""),
        (GIB, None, WARNING, "1 GiB available; 4 ranks need about 1.2 GiB", "fewer ranks: -n 3"),
        (8 * GIB, Limit(GIB, 2 * GIB), FAILURE, "0 B left of the container's 1 GiB", "-n 1"),
        (300 * MIB, None, FAILURE, "300 MiB available; 4 ranks need", "fewer ranks: -n 1"),
    ],
)
def test_memory(
    available: int, limit: Limit | None, verdict: Verdict, found: str, remedy: str
) -> None:
    expect(partial(check_memory, 4, available, limit), verdict, found, remedy)


@pytest.mark.parametrize(
    ("soft", "verdict", "found"),
    [
        (None, OK, "no limit"),
        (128 * GIB, OK, "128 GiB"),
        (2 * GIB, WARNING, "limited to 2 GiB a process (ulimit -v)"),
        (GIB, FAILURE, "too little for torch and its threads"),
    ],
)
def test_address_space(soft: int | None, verdict: Verdict, found: str) -> None:
    remedy = "" if verdict is OK else "ulimit -v unlimited"
    expect(partial(check_address_space, soft), verdict, found, remedy)


@pytest.mark.parametrize(
    ("size", "nccl_wanted", "verdict", "found", "remedy"),
    [
        ((16 * GIB, 15 * GIB), True, OK, "15 GiB free of 16 GiB", ""),
        ((64 * MIB, 64 * MIB), False, WARNING, "64 MiB free of 64 MiB: too little", "--shm-size"),
        ((16 * GIB, MIB), False, WARNING, "will crash", "ls /dev/shm"),
        ((16 * GIB, MIB), True, FAILURE, "NCCL needs more", "ls /dev/shm"),
        (None, False, WARNING, "missing", "mount -t tmpfs"),
    ],
)
def test_shared_memory(
    size: tuple[int, int] | None, nccl_wanted: bool, verdict: Verdict, found: str, remedy: str
) -> None:
    expect(partial(check_shared_memory, size, nccl_wanted), verdict, found, remedy)


@pytest.mark.parametrize(
    ("soft", "hard", "world_size", "verdict", "found", "remedy"),
    [
        (None, None, 256, OK, "no limit", ""),
        (1024, 4096, 4, OK, "1,024 a process (ulimit -n)", ""),
        (256, None, 4, WARNING, "data loading takes more", "ulimit -n 65536"),
        (1024, 4096, 256, FAILURE, "256 ranks take up to 1,872", "ulimit -n 4096"),
        (1024, 1024, 256, FAILURE, "1,024 a process", "Ask the administrator"),
    ],
)
def test_open_files(
    soft: int | None, hard: int | None, world_size: int, verdict: Verdict, found: str, remedy: str
) -> None:
    expect(partial(check_open_files, soft, hard, world_size), verdict, found, remedy)


@pytest.mark.parametrize(
    ("soft", "used", "limit", "verdict", "found", "remedy"),
    [
        (None, 0, None, OK, "no limit", ""),
        (4096, 300, None, OK, "room for 3,796 threads of 4,096 (ulimit -u)", ""),
        (500, 300, None, WARNING, "4 ranks take about 108", "ulimit -u unlimited"),
        (400, 500, None, FAILURE, "room for 0 threads of 400", "ulimit -u unlimited"),
        (4096, 300, Limit(100, 40), FAILURE, "60 threads of the container's 100", "--pids-limit"),
    ],
)
def test_processes(
    soft: int | None, used: int, limit: Limit | None, verdict: Verdict, found: str, remedy: str
) -> None:
    expect(partial(check_processes, 4, 1, soft, used, limit), verdict, found, remedy)


@pytest.mark.parametrize(
    ("cores", "asked", "omp", "verdict", "found", "remedy"),
    [
        (16, 0, None, OK, "16 for 4 ranks", ""),
        (16, 4, "8", OK, "16 for 4 ranks", ""),
        (2, 0, None, WARNING, "4 ranks share 2: fine for learning", "For timings: -n 2"),
        (16, 8, None, WARNING, "4 ranks × 8 threads (--threads-per-rank) on 16", "4 threads a"),
        (16, 0, "16", WARNING, "4 ranks × 16 threads (OMP_NUM_THREADS) on 16", "4 threads a rank"),
        (16, 0, "many", WARNING, "OMP_NUM_THREADS=many is not a number", "OMP_NUM_THREADS=4"),
    ],
)
def test_cores(
    cores: int, asked: int, omp: str | None, verdict: Verdict, found: str, remedy: str
) -> None:
    expect(partial(check_cores, cores, 4, asked, omp), verdict, found, remedy)


@pytest.mark.parametrize(("text", "threads"), [(None, 0), ("4", 4), ("4,2", 4), ("x", 0), ("", 0)])
def test_threads_as_openmp_writes_them(text: str | None, threads: int) -> None:
    assert threads_of(text) == threads


TMP = Folder("/tmp", "", 50 * GIB, 100_000)


@pytest.mark.parametrize(
    ("folder", "verdict", "found", "remedy"),
    [
        (TMP, OK, "/tmp, 50 GiB free", ""),
        (replace(TMP, free_files=None), OK, "/tmp, 50 GiB free", ""),
        (replace(TMP, free_bytes=100 * MIB), WARNING, "little for logs", "du -sh /tmp/*"),
        (replace(TMP, free_bytes=MIB), FAILURE, "/tmp, 1 MiB free", "du -sh /tmp/*"),
        (replace(TMP, free_files=3), FAILURE, "only 3 more files", "du -sh /tmp/*"),
        (replace(TMP, trouble="Read-only file system"), FAILURE, "Read-only", "TMPDIR=/tmp"),
    ],
)
def test_the_temporary_folder(folder: Folder, verdict: Verdict, found: str, remedy: str) -> None:
    expect(partial(check_temporary_folder, folder), verdict, found, remedy)


def test_how_ranks_will_start() -> None:
    expect(partial(check_fork, True, "linux"), OK, "they are forked")
    expect(partial(check_fork, False, "darwin"), OK, "forking is not safe on macOS")


def test_ranks_of_an_earlier_job() -> None:
    expect(partial(check_earlier_ranks, ()), OK, "none is left over")
    left = (EarlierRank(71, "0", "python train.py"), EarlierRank(72, "1", "python train.py"))
    found = "ranks 0-1 of a job whose launcher has ended still run, pid 71 (python train.py)"
    expect(partial(check_earlier_ranks, left), WARNING, found, "kill 71 72")
    expect(partial(check_earlier_ranks, left[:1]), WARNING, "rank 0 of a job", "kill 71")


def test_the_tightest_limit_of_a_cgroup_and_those_around_it_counts(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/user/job\n")
    write(tmp_path / "fs/user/job", memory__max="max\n", memory__current="7\n", pids__max="max\n")
    write(
        tmp_path / "fs/user",
        memory__max="1000\n",
        memory__current="900\n",
        memory__stat="anon 400\ninactive_file 500\n",
        pids__max="50\n",
        pids__current="20\n",
    )
    assert container_memory(tmp_path / "fs", membership) == Limit(1000, 400)
    assert container_processes(tmp_path / "fs", membership) == Limit(50, 20)
    assert Limit(50, 70).left == 0


def test_limits_of_version_1_are_read_too(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("8:pids:/\n4:cpu,memory:/docker/ab\n0::/\n")
    write(
        tmp_path / "fs/memory",  # in a container its own folder is the mount
        memory__limit_in_bytes="2000\n",
        memory__usage_in_bytes="1500\n",
        memory__stat="inactive_file 1\ntotal_inactive_file 300\n",
    )
    write(tmp_path / "fs/pids", pids__max="64\n", pids__current="60\n")
    assert container_memory(tmp_path / "fs", membership) == Limit(2000, 1200)
    assert container_processes(tmp_path / "fs", membership) == Limit(64, 60)


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    assert container_memory(tmp_path, membership) is None
    membership.write_text("4:memory:/../../x\n")
    files = {"memory__limit_in_bytes": f"{2**63 - 4096}\n", "memory__usage_in_bytes": "1\n"}
    write(tmp_path / "memory", **files)
    assert container_memory(tmp_path, membership) is None
    assert container_processes(tmp_path, membership) is None
