"""Which fork servers are equal, so that one forks the other, and which clients are accepted."""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_notebook.launch import shared_fork_server
from ddp_notebook.launch.fork_server import ForkServer
from ddp_notebook.launch.shared_fork_server import ListeningSocket

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there are none")


def here() -> str:
    return shared_fork_server.address(sys.path)


def test_the_same_process_has_the_same_address() -> None:
    assert here().startswith(f"\0ddp-notebook-{os.getuid()}-")
    assert here() == here()


def test_what_is_a_notebook_s_own_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    before = here()
    monkeypatch.setenv("JPY_SESSION_NAME", "another.ipynb")
    assert here() == before


@pytest.mark.parametrize("what", ["environment", "module path", "folder", "priority", "umask"])
def test_what_a_server_depends_on_makes_another_one(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    before, path = here(), list(sys.path)
    match what:
        case "environment":
            monkeypatch.setenv("TORCH_SHOW_CPP_STACKTRACES", "1")
        case "module path":
            path.insert(0, str(tmp_path))
        case "folder":
            monkeypatch.chdir(tmp_path)
        case "priority":
            monkeypatch.setattr(os, "getpriority", lambda *_: 7)
        case "umask":
            mask = os.umask(0o077 if os.umask(0o022) != 0o077 else 0o027)
            request.addfinalizer(lambda: os.umask(mask))
    assert shared_fork_server.address(path) not in ("", before)


@pytest.mark.parametrize("name", ["", "notes.txt", "data/x.csv", "random.py", "torch/__init__.py"])
def test_any_folder_will_do_that_has_nothing_to_load(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        if name:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).touch()
        monkeypatch.chdir(folder)
        addresses.append(here())
    assert (addresses[0] == addresses[1]) == (not name.endswith(".py"))


def test_an_installation_makes_another_one(tmp_path: Path) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    os.utime(folder, ns=(1, 1))
    before = shared_fork_server.address([str(folder)])
    os.utime(folder, ns=(2, 2))
    assert shared_fork_server.address([str(folder)]) != before


def test_on_another_system_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert here() == ""


def test_where_processes_cannot_be_held_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: int) -> int:
        raise PermissionError("not in this container")

    monkeypatch.setattr(os, "pidfd_open", refused)
    assert here() == ""


@pytest.fixture
def listener() -> Iterator[tuple[str, socket.socket]]:
    address = f"\0ddp-notebook-test-{os.getpid()}-{time.monotonic_ns()}"
    opened = shared_fork_server.listen(address)
    assert opened is not None
    with opened:
        yield address, opened


def test_only_one_listens(listener: tuple[str, socket.socket]) -> None:
    assert shared_fork_server.listen(listener[0]) is None


def test_who_asks_gets_pipes_to_its_server(listener: tuple[str, socket.socket]) -> None:
    address, opened = listener
    server = shared_fork_server.request(address)
    assert server is not None
    client = shared_fork_server.accept(opened)
    assert client is not None
    server.stdin.write(b"command")
    server.stdin.close()
    assert os.read(client.commands, 100) == b"command"
    assert os.read(client.commands, 100) == b"", "no end of it is left open"
    os.write(client.events, b"event")
    client.close()
    with server.stdout:
        assert server.stdout.read() == b"event"


def test_nobody_is_asked_where_nobody_listens() -> None:
    assert shared_fork_server.request("\0ddp-notebook-test-nobody") is None
    assert shared_fork_server.listen("") is None


@pytest.fixture(params=["another user", "another container"])
def somebody_else(request: pytest.FixtureRequest) -> Callable[..., tuple[int, int, int]]:
    """What the system tells of one. There is no other user here to be one."""
    if request.param == "another user":
        return lambda _: (os.getpid(), os.getuid() + 1, os.getgid())
    return lambda _: (0, os.getuid(), os.getgid())


def test_somebody_else_s_server_is_not_asked(
    listener: tuple[str, socket.socket],
    somebody_else: Callable[..., tuple[int, int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shared_fork_server, "_peer_credentials", somebody_else)
        assert shared_fork_server.request(listener[0]) is None
    assert shared_fork_server.accept(listener[1]) is None, "nothing was sent"


def test_somebody_else_gets_no_server(
    listener: tuple[str, socket.socket],
    somebody_else: Callable[..., tuple[int, int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = shared_fork_server.request(listener[0])
    assert server is not None
    with monkeypatch.context() as patch:
        patch.setattr(shared_fork_server, "_peer_credentials", somebody_else)
        assert shared_fork_server.accept(listener[1]) is None
    with server.stdin, server.stdout:
        assert server.answers(10) and server.stdout.read() == b"", "it knows at once"


@pytest.mark.parametrize("sent", [b"", b"?"])
def test_who_asks_without_pipes_gets_no_server(
    sent: bytes, listener: tuple[str, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_fork_server, "_RECEIVE_TIMEOUT_S", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.connect(listener[0])
        asking.sendall(sent)
        assert shared_fork_server.accept(listener[1]) is None
    assert shared_fork_server.accept(listener[1]) is None, "and nobody waits any more"


def test_a_server_that_cannot_fork_serves_its_own_notebook_on(
    listener: tuple[str, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> int:
        raise BlockingIOError("Resource temporarily unavailable")

    loop = ForkServer.__new__(ForkServer)  # its loop alone: it would take this process's stdin
    loop.listening = ListeningSocket(listener[0], os.dup(listener[1].fileno()))
    server = shared_fork_server.request(listener[0])
    assert server is not None
    with monkeypatch.context() as patch:
        patch.setattr(os, "fork", full)
        patch.setattr(gc, "freeze", lambda: None)
        loop.fork_servers()
    loop.listening.close()
    with server.stdin, server.stdout:
        assert server.answers(10) and server.stdout.read() == b"", "and the other knows at once"
