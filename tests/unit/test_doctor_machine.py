"""The doctor's checks of the machine, with facts given, and the limits of containers."""

from __future__ import annotations

from functools import partial

import pytest
from doctor_cases import FAILURE, GIB, MIB, OK, WARNING, expect

from ddp_notebook.doctor.checks import (
    as_init_says,
    check_cores,
    check_memory,
    check_shared_memory,
)
from ddp_notebook.model.doctor import Verdict


@pytest.mark.parametrize(
    ("left", "verdict", "found", "remedy"),
    [
        (8 * GIB, OK, "8 GiB available", ""),
        (GIB, WARNING, "1 GiB available; 4 ranks with a small model take", "fewer ranks: -n 3"),
        (200 * MIB, FAILURE, "4 ranks do not fit into memory: 200 MiB are left", "--world-size 1"),
    ],
)
def test_memory(left: int, verdict: Verdict, found: str, remedy: str) -> None:
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
    ("cores", "omp", "verdict", "found", "remedy"),
    [
        (16, None, OK, "16 for 4 ranks", ""),
        (2, None, WARNING, "4 ranks share 2: fine for learning", "For timings: -n 2"),
        (16, "16", WARNING, "4 ranks × 16 threads (OMP_NUM_THREADS) on 16", "4 threads a rank"),
        (16, "4,2", OK, "16 for 4 ranks", ""),
        (16, "many", OK, "16 for 4 ranks", ""),
    ],
)
def test_cores(cores: int, omp: str | None, verdict: Verdict, found: str, remedy: str) -> None:
    expect(partial(check_cores, cores, 4, omp), verdict, found, remedy)
