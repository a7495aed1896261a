"""Which servers would be alike, and who is let in."""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_notebook.launch import siblings
from ddp_notebook.launch.forkserver import ForkServer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there are none")


def here() -> str:
    return siblings.meeting_point(sys.path)


def test_the_same_process_has_the_same_meeting_point() -> None:
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
    assert siblings.meeting_point(path) not in ("", before)


@pytest.mark.parametrize("name", ["", "notes.txt", "data/x.csv", "random.py", "torch/__init__.py"])
def test_any_folder_will_do_that_has_nothing_to_load(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        if name:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).touch()
        monkeypatch.chdir(folder)
        points.append(here())
    assert (points[0] == points[1]) == (not name.endswith(".py"))


def test_an_installation_makes_another_one(tmp_path: Path) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    os.utime(folder, ns=(1, 1))
    before = siblings.meeting_point([str(folder)])
    os.utime(folder, ns=(2, 2))
    assert siblings.meeting_point([str(folder)]) != before


def test_on_another_system_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert here() == ""


def test_where_processes_cannot_be_held_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: int) -> int:
        raise PermissionError("not in this container")

    monkeypatch.setattr(os, "pidfd_open", refused)
    assert here() == ""


@pytest.fixture
def door() -> Iterator[tuple[str, socket.socket]]:
    point = f"\0ddp-notebook-test-{os.getpid()}-{time.monotonic_ns()}"
    opened = siblings.listen(point)
    assert opened is not None
    with opened:
        yield point, opened


def test_only_one_listens(door: tuple[str, socket.socket]) -> None:
    assert siblings.listen(door[0]) is None


def test_who_asks_gets_pipes_to_its_server(door: tuple[str, socket.socket]) -> None:
    point, opened = door
    sibling = siblings.ask(point)
    assert sibling is not None
    guest = siblings.admit(opened)
    assert guest is not None
    sibling.stdin.write(b"command")
    sibling.stdin.close()
    assert os.read(guest.commands, 100) == b"command"
    assert os.read(guest.commands, 100) == b"", "no end of it is left open"
    os.write(guest.events, b"event")
    guest.close()
    with sibling.stdout:
        assert sibling.stdout.read() == b"event"


def test_nobody_is_asked_where_nobody_listens() -> None:
    assert siblings.ask("\0ddp-notebook-test-nobody") is None
    assert siblings.listen("") is None


@pytest.fixture(params=["another user", "another container"])
def somebody_else(request: pytest.FixtureRequest) -> Callable[..., tuple[int, int, int]]:
    """What the system tells of one. There is no other user here to be one."""
    if request.param == "another user":
        return lambda _: (os.getpid(), os.getuid() + 1, os.getgid())
    return lambda _: (0, os.getuid(), os.getgid())


def test_somebody_else_s_server_is_not_asked(
    door: tuple[str, socket.socket],
    somebody_else: Callable[..., tuple[int, int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(siblings, "_peer", somebody_else)
        assert siblings.ask(door[0]) is None
    assert siblings.admit(door[1]) is None, "nothing was sent"


def test_somebody_else_gets_no_server(
    door: tuple[str, socket.socket],
    somebody_else: Callable[..., tuple[int, int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sibling = siblings.ask(door[0])
    assert sibling is not None
    with monkeypatch.context() as patch:
        patch.setattr(siblings, "_peer", somebody_else)
        assert siblings.admit(door[1]) is None
    with sibling.stdin, sibling.stdout:
        assert sibling.answers(10) and sibling.stdout.read() == b"", "it knows at once"


@pytest.mark.parametrize("sent", [b"", b"?"])
def test_who_asks_without_pipes_gets_no_server(
    sent: bytes, door: tuple[str, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(siblings, "_SENT_WITHIN_S", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.connect(door[0])
        asking.sendall(sent)
        assert siblings.admit(door[1]) is None
    assert siblings.admit(door[1]) is None, "and nobody waits any more"


def test_a_server_that_cannot_fork_serves_its_own_notebook_on(
    door: tuple[str, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> int:
        raise BlockingIOError("Resource temporarily unavailable")

    server = ForkServer.__new__(ForkServer)  # its loop alone: it would take this one's stdin
    server.door = door[1]
    sibling = siblings.ask(door[0])
    assert sibling is not None
    with monkeypatch.context() as patch:
        patch.setattr(os, "fork", full)
        patch.setattr(gc, "freeze", lambda: None)
        server.see_to_others()
    with sibling.stdin, sibling.stdout:
        assert sibling.answers(10) and sibling.stdout.read() == b"", "and the other knows at once"
