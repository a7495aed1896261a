"""Limits of open files and processes are told before, or when, ranks cannot start."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_notebook.session.setup.limits import why_too_few_files, why_too_few_processes

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
    assert why_too_few_processes(2, tmp_path) == ""
    said = why_too_few_processes(4, tmp_path)
    assert "may have 100 processes and threads (ulimit -u), and has 50: 4 ranks need 60" in said


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


@pytest.mark.usefixtures("limit")
def test_too_few_open_files_are_said_for_what_they_are() -> None:
    said = why_too_few_files(OSError(errno.EMFILE, "Too many open files"))
    assert "may have 100 files and sockets open (ulimit -n)" in said
    assert "(4096, 4096)" in said
    assert why_too_few_files(OSError(errno.ENOENT, "no")) == ""
    assert why_too_few_files(RuntimeError()) == ""
