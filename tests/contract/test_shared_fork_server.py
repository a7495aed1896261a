"""Fork servers of several notebooks share what they have loaded, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import eventually, is_alive, pids_of

from ddp_notebook.launch import client, shared_fork_server
from ddp_notebook.launch.client import ForkServerClient
from ddp_notebook.launch.shared_fork_server import ForkedServer
from ddp_notebook.session import InitOptions, Session

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each notebook has its own"),
    pytest.mark.usefixtures("cold"),
]
READY_WITHIN_S = 60
SUM = "x = torch.ones(1)\ndist.all_reduce(x)\nassert x.item() == 2"
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
    json.dump([type(server._process).__name__, server.pid, child], file)
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
    """Fork servers that find no torch and are ready sooner: what is tested is who forks whom."""
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


def test_the_second_has_what_the_first_has_loaded_without_loading_it(
    servers: Any, tmp_path: Path
) -> None:
    first, second = servers(), servers()  # the second asks while the first still loads torch
    assert isinstance(second._process, ForkedServer)
    assert ready(second).ready.result()["import_s"] == 0
    assert ready(first).ready.result()["import_s"] > 0
    assert psutil.Process(second.pid).ppid() == first.pid
    assert os.getsid(second.pid) == second.pid, "it has a session of its own"
    memory = psutil.Process(second.pid).memory_full_info()
    assert memory.uss < memory.rss / 10
    _, ended = spawn(second, tmp_path, ["builtins:exec", {"source": 5}])
    assert ended.result(READY_WITHIN_S) == 1, "its children are its own, and it hears of them"
    assert "TypeError" in (tmp_path / "log").read_text()


@pytest.mark.usefixtures("without_torch")
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


@pytest.mark.usefixtures("without_torch")
def test_one_that_a_new_one_would_differ_from_is_not_used_again(
    servers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = ready(servers())
    with monkeypatch.context() as changed:
        changed.syspath_prepend(tmp_path)
        assert not server.equals_a_new_one()
    with monkeypatch.context() as changed:
        changed.setenv("TORCH_LOGS", "+dynamo")  # torch reads it when it is loaded
        assert not server.equals_a_new_one()
    assert server.equals_a_new_one()


@pytest.mark.usefixtures("without_torch")
def test_each_has_its_own_end(servers: Any, tmp_path: Path) -> None:
    first = ready(servers())
    second = ready(servers())
    child, ended = spawn(second, tmp_path, ["subprocess:call", {"args": ["sleep", "1000"]}])
    first.close()
    third = ready(servers())
    assert not ended.done() and is_alive(second.pid) and is_alive(child)
    assert third.pid != second.pid
    second.close()
    assert ended.result(READY_WITHIN_S) == -signal.SIGTERM
    assert not is_alive(second.pid) and is_alive(third.pid)


@pytest.mark.usefixtures("without_torch")
def test_when_the_first_is_gone_another_one_is_asked(servers: Any) -> None:
    first = ready(servers())
    second = ready(servers())
    address = shared_fork_server.address(sys.path)
    first.close()

    eventually(Path(address).exists, 20, what="the second listens")
    third = ready(servers())
    assert psutil.Process(third.pid).ppid() == second.pid


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("how", ["it is stopped", "it is killed"])
def test_when_who_is_asked_does_not_answer_a_server_is_started(
    how: str, servers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_FORKED_WITHIN_S", 0.5 if how == "it is stopped" else 60.0)
    first = ready(servers())
    os.kill(first.pid, signal.SIGSTOP)
    second = servers()
    assert isinstance(second._process, ForkedServer) and second.pid == 0
    folder = tmp_path / "session"
    folder.mkdir()
    second.own(folder)  # told before there is anybody to tell it to
    if how == "it is killed":
        os.kill(first.pid, signal.SIGKILL)
    assert ready(second).ready.result()["import_s"] > 0
    assert not isinstance(second._process, ForkedServer) and is_alive(second.pid)
    second.close()
    assert not folder.exists()
    if how == "it is stopped":
        os.kill(first.pid, signal.SIGCONT)


@pytest.mark.usefixtures("without_torch")
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


@pytest.mark.usefixtures("without_torch")
def test_one_that_is_closed_before_it_is_there_leaves_nothing(servers: Any) -> None:
    first = servers()
    second = servers()
    second.close()
    eventually(lambda: not second.alive, 20, "it is known to be gone")
    assert second.pid == 0 or not is_alive(second.pid)
    assert is_alive(ready(first).pid)


@pytest.mark.usefixtures("without_torch")
def test_it_ends_with_its_notebook_also_when_a_child_of_that_holds_its_pipes(
    servers: Any, tmp_path: Path
) -> None:
    first = ready(servers())
    mark = tmp_path / "mark"
    # Its module path has to be this one's, or its server would not be like ours.
    code = f"import json, sys; sys.path[:] = json.loads({json.dumps(sys.path)!r})\n{NOTEBOOK}"
    notebook = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "log"), str(mark)])
    try:
        kind, server, child = eventually(lambda: mark.exists() and json.loads(mark.read_text()), 60)
        assert kind == "ForkedServer" and psutil.Process(server).ppid() == first.pid
        holder = psutil.Process(notebook.pid).children()[0]
        notebook.kill()
        notebook.wait()
        eventually(
            lambda: not is_alive(server) and not is_alive(child), 20, "the forked server ends"
        )
        assert holder.is_running()
        holder.kill()
    finally:
        notebook.kill()
        notebook.wait()


def test_a_session_goes_on_when_the_one_whose_server_forked_its_own_is_killed() -> None:
    with ExitStack() as stack:
        sessions = [Session(), Session()]
        for session in sessions:
            stack.callback(session.shutdown)
            session.init(InitOptions(world_size=2, device="cpu"))
        one, two = map(pids_of, sessions)
        assert psutil.Process(two.fork_server).ppid() == one.fork_server
        for session in sessions:
            session.run_cell(SUM).raise_for_error()
        os.kill(one.fork_server, signal.SIGKILL)
        eventually(lambda: not any(map(is_alive, one.ranks)), what="the ranks of the first end")
        sessions[1].run_cell(SUM).raise_for_error()
        sessions[1].restart((1,))
        sessions[1].run_cell(SUM).raise_for_error()
        assert pids_of(sessions[1]).fork_server == two.fork_server


def test_ranks_start_in_their_own_folder_when_that_of_the_first_notebook_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with ExitStack() as stack:
        for folder in first, second:
            folder.mkdir()
            monkeypatch.chdir(folder)
            if folder is second:
                first.rmdir()
            session = Session()
            stack.callback(session.shutdown)
            session.init(InitOptions(world_size=2, device="cpu"))
        session.run_cell(f"import os\nassert os.getcwd() == {str(second)!r}").raise_for_error()
