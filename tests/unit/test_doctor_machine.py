"""The doctor's checks of the machine, with facts given, and the limits of containers."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from doctor_cases import FAILURE, GIB, MIB, OK, WARNING, expect, write

from ddp_notebook.doctor.machine import (
    as_init_says,
    check_cores,
    check_memory,
    check_shared_memory,
)
from ddp_notebook.launch.out_of_memory import Limit, container_memory
from ddp_notebook.model.doctor import Verdict


@pytest.mark.parametrize(
    ("left", "verdict", "found", "remedy"),
    [
        (8 * GIB, OK, "8 GiB available", ""),
        (None, OK, "not known", ""),
        (GIB, WARNING, "1 GiB available; 4 ranks with a small model take", "fewer ranks: -n 3"),
        (200 * MIB, FAILURE, "4 ranks do not fit into memory: 200 MiB are left", "--world-size 1"),
    ],
)
def test_memory(left: int | None, verdict: Verdict, found: str, remedy: str) -> None:
    expect(partial(check_memory, 4, left), verdict, found, remedy)


def test_what_init_refuses_is_said_in_its_words() -> None:
    why = "A process may have 64 files open. In the shell: ulimit -n 108. Or restart."
    expect(partial(as_init_says, "open files", why, "enough"), FAILURE, "64 files open", "ulimit")
    expect(partial(as_init_says, "open files", "", "enough"), OK, "enough")


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
    ("cores", "asked", "omp", "verdict", "found", "remedy"),
    [
        (16, 0, None, OK, "16 for 4 ranks", ""),
        (16, 4, "8", OK, "16 for 4 ranks", ""),
        (2, 0, None, WARNING, "4 ranks share 2: fine for learning", "For timings: -n 2"),
        (16, 8, None, WARNING, "4 ranks × 8 threads (--threads-per-rank) on 16", "4 threads a"),
        (16, 0, "16", WARNING, "4 ranks × 16 threads (OMP_NUM_THREADS) on 16", "4 threads a rank"),
        (16, 0, "4,2", OK, "16 for 4 ranks", ""),
        (16, 0, "many", OK, "16 for 4 ranks", ""),
    ],
)
def test_cores(
    cores: int, asked: int, omp: str | None, verdict: Verdict, found: str, remedy: str
) -> None:
    expect(partial(check_cores, cores, 4, asked, omp), verdict, found, remedy)


def test_the_tightest_limit_of_a_cgroup_and_those_around_it_counts(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/user/job\n")
    write(tmp_path / "fs/user/job", memory__max="max\n", memory__current="7\n")
    write(
        tmp_path / "fs/user",
        memory__max="1000\n",
        memory__current="900\n",
        memory__stat="anon 400\ninactive_file 500\n",
    )
    assert container_memory(tmp_path / "fs", membership) == Limit(1000, 400)
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
    assert container_memory(tmp_path / "fs", membership) == Limit(2000, 1200)


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    assert container_memory(tmp_path, membership) is None
    membership.write_text("4:memory:/../../x\n")
    files = {"memory__limit_in_bytes": f"{2**63 - 4096}\n", "memory__usage_in_bytes": "1\n"}
    write(tmp_path / "memory", **files)
    assert container_memory(tmp_path, membership) is None
