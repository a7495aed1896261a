"""What a machine is said to have and to do, from files as Linux writes them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddp_notebook.rank.bench.machine import Meter, busy_s
from ddp_notebook.rank.training.step_marks import RunQueue


def test_busy_time_is_of_the_cores_that_may_be_used() -> None:
    before = os.sched_getaffinity(0)
    whole = busy_s()
    try:
        os.sched_setaffinity(0, {min(before)})
        one = busy_s()
    finally:
        os.sched_setaffinity(0, before)
    assert whole is not None and one is not None and 0 < one <= whole + 1


def test_what_this_process_does_is_its_own() -> None:
    began = Meter.read()
    end_s = time.process_time() + 0.05
    while time.process_time() < end_s:
        pass
    spent = began.until(Meter.read())
    assert spent["cpu_s"] >= 0.05
    assert spent["seconds"] > 0


def test_what_a_thread_waited_for_a_core_is_read_and_nothing_where_it_is_not_told(
    tmp_path: Path,
) -> None:
    told = tmp_path / "schedstat"
    told.write_text("725923 42504 17\n")
    queue = RunQueue(told)
    assert queue.waited_ns() == 42504
    told.write_text("925923 62504 19\n")
    assert queue.waited_ns() == 62504
    queue.close()
    assert queue.waited_ns() == 0
    queue.close()
    assert RunQueue(tmp_path / "none").waited_ns() == 0


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="Linux tells this")
def test_a_thread_that_shares_a_core_waits_for_it() -> None:
    before = os.sched_getaffinity(0)
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        core = {min(before)}
        os.sched_setaffinity(child.pid, core)
        os.sched_setaffinity(0, core)  # of this thread alone
        queue = RunQueue()
        first = queue.waited_ns()
        deadline = time.monotonic() + 30
        while queue.waited_ns() == first and time.monotonic() < deadline:
            sum(range(10_000))
        assert queue.waited_ns() > first
        queue.close()
    finally:
        os.sched_setaffinity(0, before)
        child.kill()
        child.wait()
