"""A start that fails says why at once, leaves nothing, and the next one works."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from support import lacking, session_folders

from ddp_notebook.cluster.cluster import IPyParallelCluster
from ddp_notebook.errors import SetupFailed
from ddp_notebook.launch.client import ForkServerClient
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.session import InitOptions, Session
from ddp_notebook.testing import processes_of

ONE = InitOptions(world_size=1, device="cpu")
AT_ONCE_S = 10.0
"""On a quiet machine; without the news of an exit it was one to three minutes."""


def test_a_controller_that_dies_while_it_starts_is_named_at_once(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn, killed_s = ForkServerClient.spawn, []

    def killed(self: ForkServerClient, *args: Any, **options: Any) -> int:
        pid = spawn(self, *args, **options)
        monkeypatch.undo()  # the controller is the first; the next start is left alone
        os.kill(pid, signal.SIGKILL)
        killed_s.append(time.monotonic())
        return pid

    monkeypatch.setattr(ForkServerClient, "spawn", killed)
    told = r"controller \(pid \d+\) ended, killed by SIGKILL\."
    with pytest.raises(SetupFailed, match=told) as caught:
        session.init(ONE)
    assert time.monotonic() - killed_s[0] < scaled_for_load(AT_ONCE_S)
    assert "Try again with %ddp_init" in str(caught.value)
    assert session.init(ONE).snapshot.ready


def test_a_rank_that_is_stopped_while_it_starts_is_named_in_time(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.init(ONE)
    spawn = ForkServerClient.spawn

    def stopped(self: ForkServerClient, *args: Any, **options: Any) -> int:
        pid = spawn(self, *args, **options)
        os.kill(pid, signal.SIGSTOP)
        return pid

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(ForkServerClient, "spawn", stopped)
        began_s = time.monotonic()
        with pytest.raises(SetupFailed, match=r"Rank 0 did not start.* kill -CONT \d+"):
            session.restart((0,))
        assert time.monotonic() - began_s < scaled_for_load(AT_ONCE_S)
    session.restart((0,))
    session.run_cell("rank").raise_for_error()


@pytest.mark.parametrize("late", [False, True], ids=["fork server gone", "no descriptor left"])
def test_what_was_made_is_removed_where_the_rest_cannot_be_made(
    session: Session, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    before, taken = session_folders(), []

    def fails(self: Any, *_: Any) -> None:
        taken.append(session_folders())
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as meanwhile:
        of, name = (IPyParallelCluster, "__init__") if late else (ForkServerClient, "own")
        meanwhile.setattr(of, name, fails)
        with pytest.raises(SetupFailed, match="Nothing is left running"):
            session.init(ONE)
    assert taken[0] != before and session_folders() == before
    assert session.init(ONE).snapshot.ready


def test_without_a_loopback_interface_nothing_is_started(tmp_path: Path) -> None:
    """In a network namespace of its own it is down. Before, a start took three minutes to fail."""
    script = tmp_path / "start.py"
    script.write_text(WITHOUT_LOOPBACK)
    if subprocess.run(["unshare", "--net", "true"], check=False).returncode:
        lacking("no network namespace here")
    words = ["unshare", "--net", sys.executable, str(script)]
    ended = subprocess.run(words, check=False, capture_output=True, text=True, timeout=120)
    assert "the loopback interface is down" in ended.stdout, ended
    assert "Nothing is left running" in ended.stdout


WITHOUT_LOOPBACK = """
from ddp_notebook.errors import SetupFailed
from ddp_notebook.session import InitOptions, Session
session = Session()
try:
    session.init(InitOptions(world_size=1, device="cpu"))
except SetupFailed as error:
    print(error)
finally:
    session.shutdown()
"""


def test_with_as_few_files_as_are_asked_for_ranks_start(tmp_path: Path) -> None:
    script = tmp_path / "start.py"
    script.write_text(WITH_FEW_FILES)
    words = [sys.executable, str(script)]
    ended = subprocess.run(words, check=False, capture_output=True, text=True, timeout=120)
    assert "ready with 94 files" in ended.stdout, ended
    assert "2 ranks need 94" in ended.stdout, ended


WITH_FEW_FILES = """
import resource
from ddp_notebook.errors import UsageMistake
from ddp_notebook.session import InitOptions, Session
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
session = Session()
for limit in (93, 94):
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    try:
        session.init(InitOptions(world_size=2, device="cpu"))
        session.run_cell("dist.barrier()").raise_for_error()
        print("ready with", limit, "files")
    except UsageMistake as mistake:
        print(mistake)
session.shutdown()
"""


def test_where_home_cannot_be_written_no_folder_stays(tmp_path: Path) -> None:
    """IPython makes one in each process then, and leaves it."""
    script = tmp_path / "start.py"
    script.write_text(RESTARTED)
    folder = tmp_path / "tmp"
    folder.mkdir()
    environment = {**os.environ, "HOME": "/nowhere", "TMPDIR": str(folder)}
    words = [sys.executable, str(script)]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended
    assert not [path.name for path in folder.iterdir() if path.name.startswith("tmp")]


RESTARTED = """
from ddp_notebook.session import InitOptions, Session
session = Session()
session.init(InitOptions(world_size=1, device="cpu"))
session.restart((0,))
session.shutdown()
"""


def test_a_long_name_of_the_temporary_folder_is_no_obstacle(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket's path has room for about a hundred bytes."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert session.init(ONE).snapshot.ready
    folder = processes_of(session).folder
    session.shutdown()
    assert not folder.exists() and not list(long.iterdir())


def test_a_file_with_the_name_of_a_module_that_the_ranks_need_is_named(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("sys.path", [str(tmp_path), *sys.path])
        (tmp_path / "json.py").write_text("x = 1")
        (tmp_path / "train.py").write_text("x = 1")
        (tmp_path / "queue.py").write_text("from torch import *")
        with pytest.raises(SetupFailed, match="Rename them") as caught:
            session.init(ONE)
        assert f"{tmp_path}/json.py and {tmp_path}/queue.py have the names of" in str(caught.value)
        assert "train.py" not in str(caught.value)
    assert session.init(ONE).snapshot.ready
