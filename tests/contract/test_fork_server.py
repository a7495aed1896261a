"""The fork server of a session: what it inherits, what it removes, and that it ends."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import eventually, is_alive

from ddp_notebook.errors import SessionLost
from ddp_notebook.launch.client import ForkServerClient

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("without_torch")]
READY_WITHIN_S = 60
NOTEBOOK = """
import json, os, signal, sys
from ddp_notebook.launch.client import ForkServerClient
server = ForkServerClient("fork")
server.ready.result(60)
log, mark = sys.argv[1:]
sleeps = ["subprocess:call", {"args": ["sleep", "1000"]}]
spec = {"calls": [sleeps], "env": dict(os.environ), "cwd": "/", "log": log}
child = server.spawn(spec, print)
if os.fork() == 0:  # holds the pipes of the notebook open
    signal.pause()
with open(mark + ".new", "w") as file:
    json.dump([server.pid, child], file)
os.rename(mark + ".new", mark)
signal.pause()
"""


@pytest.fixture
def servers() -> Iterator[Any]:
    """Makes fork servers, which end with the test."""
    with ExitStack() as stack:

        def make() -> ForkServerClient:
            server = ForkServerClient("fork")
            stack.callback(server.close)
            return server

        yield make


@pytest.fixture
def without_torch(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fork servers that find no torch and are ready sooner."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "torch.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(folder)


def ready(server: ForkServerClient) -> ForkServerClient:
    server.ready.result(READY_WITHIN_S)
    return server


def spawn(server: ForkServerClient, folder: Path, *calls: Any) -> tuple[int, Future[int]]:
    """A child of the server, and its exit code."""
    ended: Future[int] = Future()
    log = str(folder / "log")
    spec = {"calls": list(calls), "env": dict(os.environ), "cwd": str(folder), "log": log}
    return server.spawn(spec, ended.set_result), ended


def test_what_python_loads_first_may_print(
    servers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site = (
        "import os\nprint('hello', end='', flush=True)\nos.write(1, b'{\"event\": \"reset\"}\\n')"
    )
    (tmp_path / "sitecustomize.py").write_text(site)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = ready(servers())
    _, ended = spawn(server, tmp_path, ["os:_exit", {"status": 3}])
    assert ended.result(READY_WITHIN_S) == 3


def test_a_child_that_raises_says_so_in_its_log(servers: Any, tmp_path: Path) -> None:
    _, ended = spawn(ready(servers()), tmp_path, ["builtins:exec", {"source": 5}])
    assert ended.result(READY_WITHIN_S) == 1
    assert "TypeError" in (tmp_path / "log").read_text()


def test_one_that_a_new_one_would_differ_from_is_not_used_again(
    servers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    os.utime(packages, ns=(1, 1))
    monkeypatch.syspath_prepend(packages)
    server = servers()
    assert server.equals_a_new_one()
    monkeypatch.setenv("JPY_SESSION_NAME", "another.ipynb")  # the notebook's own
    assert server.equals_a_new_one()
    with monkeypatch.context() as changed:
        changed.syspath_prepend(tmp_path)
        assert not server.equals_a_new_one()
    with monkeypatch.context() as changed:
        changed.setenv("TORCH_LOGS", "+dynamo")  # torch reads it when it is loaded
        assert not server.equals_a_new_one()
    os.utime(packages, ns=(2, 2))  # as pip does
    assert not server.equals_a_new_one()
    os.utime(packages, ns=(1, 1))
    mask = os.umask(0o077)
    request.addfinalizer(lambda: os.umask(mask))
    assert not server.equals_a_new_one()
    os.umask(mask)
    assert server.equals_a_new_one()
    usual = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0 if usual[0] else usual[1], usual[1]))
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_CORE, usual))
    assert server.equals_a_new_one() == (usual == resource.getrlimit(resource.RLIMIT_CORE))


def test_a_server_that_ends_removes_its_folder_and_not_what_stands_there_now(
    servers: Any, tmp_path: Path
) -> None:
    own, replaced, server = tmp_path / "own", tmp_path / "replaced", ready(servers())
    for folder in (own, replaced):
        folder.mkdir()
        (folder / "file").touch()
        server.own(folder)
    replaced.rename(tmp_path / "renamed")
    replaced.mkdir()
    (replaced / "of another").touch()
    server.close()
    assert not own.exists() and (replaced / "of another").exists()
    assert (tmp_path / "renamed" / "file").exists()


def test_the_limit_counts_from_when_it_last_got_on(
    servers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = tmp_path / "go-on"
    slow = f"import pathlib\nwhile not pathlib.Path({str(go_on)!r}).exists(): pass"
    (tmp_path / "sitecustomize.py").write_text(slow)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = servers()
    began_s = time.monotonic()
    threading.Timer(4.0, go_on.touch).start()  # busy for longer than the limit
    assert server.result_of(server.ready, 2.0)["mode"] == "fork"
    assert time.monotonic() - began_s > 4.0

    go_on.unlink()
    idle = servers()
    eventually(lambda: psutil.Process(idle.pid).cpu_times().user > 0, what="it has begun")
    os.kill(idle.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        idle.result_of(idle.ready, 2.0)


def test_one_that_is_closed_before_it_is_ready_leaves_nothing(servers: Any) -> None:
    server = servers()
    server.close()
    eventually(lambda: not server.alive, 20, "it is known to be gone")
    assert not is_alive(server.pid)


def test_it_ends_with_its_notebook_also_when_a_child_of_that_holds_its_pipes(
    tmp_path: Path,
) -> None:
    mark = tmp_path / "mark"
    code = f"import json, sys; sys.path[:] = json.loads({json.dumps(sys.path)!r})\n{NOTEBOOK}"
    notebook = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "log"), str(mark)])
    try:
        server, child = eventually(lambda: mark.exists() and json.loads(mark.read_text()), 60)
        holder = next(p for p in psutil.Process(notebook.pid).children() if p.pid != server)
        notebook.kill()
        notebook.wait()
        eventually(lambda: not is_alive(server) and not is_alive(child), 20, "the server ends")
        assert holder.is_running()
        holder.kill()
    finally:
        notebook.kill()
        notebook.wait()


LEAVES = """
import os, subprocess, sys, time
def leave(mark):
    own = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    if os.fork() == 0:  # a daemon: its parent is gone, and its session is its own
        os.setsid()
        if os.fork() == 0:
            with open(mark + ".new", "w") as file:
                file.write(f"{own.pid} {os.getpid()}")
            os.rename(mark + ".new", mark)
            time.sleep(1000)
        os._exit(0)
    time.sleep(1000)
"""


def test_what_a_child_leaves_in_sessions_of_its_own_ends_with_it_and_others_stay(
    servers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES)
    monkeypatch.syspath_prepend(tmp_path)
    server = ready(servers())
    left: list[list[int]] = []
    for name in "ab":
        mark = tmp_path / name
        pid, _ = spawn(server, tmp_path, ["leaves:leave", {"mark": str(mark)}])
        eventually(mark.exists, 20, "it has started its own")
        left.append([pid, *map(int, mark.read_text().split())])
    (first, *of_first), second = left
    server.signal(first, signal.SIGKILL)
    eventually(lambda: not any(map(is_alive, of_first)), 5, "what the first has left is gone")
    assert all(map(is_alive, second))  # also the daemon, whose parent has ended
    server.close()
    assert not any(map(is_alive, second))


def test_nothing_is_awaited_of_a_server_that_is_gone_although_its_pipe_still_takes_commands(
    servers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A child that is about to die holds the other end of the pipe for a moment."""
    server = ready(servers())
    gone = threading.Event()
    server.on_lost(gone.set)
    os.kill(server.pid, signal.SIGKILL)
    assert gone.wait(20)
    monkeypatch.setattr(server, "_send", lambda command: None)
    monkeypatch.setattr(server, "result_of", lambda *_: pytest.fail("it waits for an answer"))
    with pytest.raises(SessionLost):
        spawn(server, tmp_path, ["subprocess:call", {"args": ["true"]}])
    assert not server.reset()
