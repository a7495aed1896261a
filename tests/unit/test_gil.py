"""A rank in which native code waits and holds the GIL: how it is seen, and what is said of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from collective_cases import found
from support import eventually
from traces import all_reduce, play

from ddp_notebook.diagnosis import diagnose_run
from ddp_notebook.jobs.prepared import in_both
from ddp_notebook.launch.process_groups import waits_for_gil
from ddp_notebook.model import Activity, Category, Diagnosis, Finding, RankReport

_HELD = """
import ctypes, os, threading
read, write = os.pipe()
threading.Thread(target=threading.Event().wait, daemon=True).start()
{}
"""
_ASKS = "def ask():\n    while True: pass\nthreading.Thread(target=ask, daemon=True).start()\n"


@contextmanager
def _process(code: str) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", _HELD.format(code)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"here\n"
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_native_code_that_waits_and_holds_the_gil_is_seen_from_outside() -> None:
    keeps = "print('here', flush=True)\nctypes.PyDLL(None).read(read, ctypes.c_char_p(b' '), 1)"
    with _process(_ASKS + keeps) as pid:
        eventually(lambda: waits_for_gil(pid), what="it waits for the GIL")


@pytest.mark.parametrize(
    "code",
    [
        "print('here', flush=True)\nctypes.CDLL(None).read(read, ctypes.c_char_p(b' '), 1)",
        "print('here', flush=True)\nos.read(read, 1)",
        _ASKS + "print('here', flush=True)\nwhile True: pass",  # computes
        _ASKS + "print('here', flush=True)\nos.read(read, 1)",
    ],
)
def test_a_process_that_waits_otherwise_or_computes_does_not_wait_for_the_gil(code: str) -> None:
    with _process(code) as pid:
        assert not waits_for_gil(pid)
    assert not waits_for_gil(pid)  # it is gone


@pytest.mark.parametrize(("gil_s", "told"), [(21.0, True), (5.0, False), (0.0, False)])
def test_a_rank_that_keeps_the_gil_for_long_is_named(gil_s: float, told: bool) -> None:
    silent = RankReport(1, Activity.SILENT, process="sleeping", pid=7, gil_s=gil_s)
    case = play({0: [all_reduce(5)], 1: []}, {1: silent})
    assert found(case) == [("gil-deadlock", (1,))] * told
    assert [f.category for f in diagnose_run(case).findings] == ["gil-deadlock"] * told


def test_a_job_that_looks_otherwise_a_moment_later_is_not_called_good() -> None:
    """Its cause may become known between two looks: then what the first one found is no more."""
    undecided = Finding(Category.UNDECIDED, (0,), "cause", "remedy")
    held = Finding(Category.GIL_DEADLOCK, (1,), "cause", "remedy")
    first, second = Diagnosis(findings=(undecided,)), Diagnosis(findings=(held,))
    both = in_both(first, second)
    assert not both.findings and "ask again" in both.unsure
    assert in_both(second, second) == second
    assert not in_both(first, Diagnosis()).unsure
