"""Processes that serve the ranks and were stopped go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from support import eventually

from ddp_notebook.launch.process_groups import is_stopped
from ddp_notebook.session.unresponsive import keep_awake

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="seen in /proc")


@pytest.fixture
def served() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def test_what_was_stopped_goes_on(served: subprocess.Popen[bytes]) -> None:
    woken = threading.Event()
    told: list[tuple[int, str]] = []

    def wake(pid: int, name: str) -> None:
        told.append((pid, name))
        os.kill(pid, signal.SIGCONT)
        woken.set()

    end_watch = keep_awake(lambda: {0: "nothing", served.pid: "controller"}, wake)
    try:
        os.kill(served.pid, signal.SIGSTOP)
        assert woken.wait(10)
        assert told[0] == (served.pid, "controller")
        eventually(lambda: not is_stopped(served.pid))
    finally:
        end_watch()


def test_what_runs_is_let_be(served: subprocess.Popen[bytes]) -> None:
    assert not is_stopped(served.pid)
    assert not is_stopped(0)
    served.kill()
    served.wait()
    assert not is_stopped(served.pid)
