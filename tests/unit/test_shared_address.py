"""Which fork servers are equal, so that one forks the other, and which clients are accepted."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_notebook.launch import child, shared_fork_server
from ddp_notebook.launch.fork_server import ForkServer
from ddp_notebook.launch.shared_fork_server import ListeningSocket

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there are none")


def here() -> str:
    return shared_fork_server.address(sys.path)


def test_the_same_process_has_the_same_address() -> None:
    assert Path(here()).parent == Path(tempfile.gettempdir(), f"ddp-notebook-{os.getuid()}")
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
    with tempfile.TemporaryDirectory() as folder:  # a short name, which a socket needs
        address = str(Path(folder, "own", "a"))
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
    client.introduce()
    assert server.identify() and server.pid == os.getpid(), "as the kernel tells"
    client = client._replace(connection=os.open(os.devnull, os.O_RDONLY))
    server.stdin.write(b"command")
    server.stdin.close()
    assert os.read(client.commands, 100) == b"command"
    assert os.read(client.commands, 100) == b"", "no end of it is left open"
    os.write(client.events, b"event")
    client.close()
    with server.stdout:
        assert server.stdout.read() == b"event"


def test_nobody_is_asked_where_nobody_listens() -> None:
    assert shared_fork_server.request("/nowhere/at-all") is None
    assert shared_fork_server.request("") is None
    assert shared_fork_server.listen("") is None


def test_the_socket_of_a_killed_server_is_taken_over(
    listener: tuple[str, socket.socket],
) -> None:
    address, opened = listener
    opened.close()  # its file stays, as when the process is killed
    assert shared_fork_server.request(address) is None
    again = shared_fork_server.listen(address)
    assert again is not None
    shared_fork_server.remove(address, shared_fork_server.file_of(address))
    again.close()
    assert not Path(address).parent.exists()


def test_no_server_removes_the_socket_of_another(listener: tuple[str, socket.socket]) -> None:
    address, opened = listener
    ended = ListeningSocket(address, os.dup(opened.fileno()))
    Path(address).unlink()
    theirs = shared_fork_server.listen(address)
    assert theirs is not None
    ended.remove()
    assert Path(address).exists()
    forked = ListeningSocket(address, os.dup(theirs.fileno()))
    forked.close()  # in a child of the server
    forked.remove()
    assert Path(address).exists()
    theirs.close()


@pytest.mark.parametrize("what", ["a folder that others can enter", "a link", "a file"])
def test_where_others_can_put_a_socket_nobody_is_asked_and_nobody_listens(
    what: str, listener: tuple[str, socket.socket]
) -> None:
    address = Path(listener[0])
    folder = address.parent
    match what:
        case "a folder that others can enter":
            folder.chmod(0o755)
        case "a link":
            folder.rename(folder.with_name("elsewhere"))
            folder.symlink_to("elsewhere")
        case _:
            folder.rename(folder.with_name("elsewhere"))
            folder.touch(mode=0o600)
    assert shared_fork_server.request(str(address)) is None
    assert shared_fork_server.listen(str(address.with_name("b"))) is None


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


def test_a_server_that_does_not_show_itself_is_not_believed(
    listener: tuple[str, socket.socket],
) -> None:
    """It would be killed in the end: what it says it is may be another process."""
    server = shared_fork_server.request(listener[0])
    client = shared_fork_server.accept(listener[1])
    assert server is not None and client is not None
    with server.stdin, server.stdout:
        assert not server.identify() and server.pid == 0
        client.close()


ASK = """
import sys
from ddp_notebook.launch import shared_fork_server
print(shared_fork_server.request(sys.argv[1]) is None)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a container here")
@pytest.mark.parametrize(
    "container",
    [
        *("unshare --pid --fork", "unshare --mount", "unshare --ipc", "unshare --uts"),
        *("unshare --net", "setpriv --groups 4242", "setpriv --no-new-privs"),
    ],
)
def test_a_process_in_a_container_gets_no_server_and_asks_none(
    container: str, listener: tuple[str, socket.socket]
) -> None:
    """With the host's files, network and user: one of its namespaces is another, or its groups."""
    begin = [*container.split(), sys.executable, "-c"]
    asking = [*begin, ASK, listener[0]]
    asked = subprocess.run(asking, capture_output=True, text=True, check=True)
    assert asked.stdout.strip() == "True"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as inside:
        hold = "import socket, sys; s = socket.socket(fileno=0); s.connect(sys.argv[1]); s.recv(1)"
        held = subprocess.Popen([*begin, hold, listener[0]], stdin=inside)
        while held.poll() is None:  # it ends when it is dropped
            if shared_fork_server._readable(listener[1].fileno(), 0.1):
                assert shared_fork_server.accept(listener[1]) is None


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
        patch.setattr(child, "disown_finalizers", lambda: None)
        loop.fork_servers()
    loop.listening.close()
    with server.stdin, server.stdout:
        assert server.answers(10) and server.stdout.read() == b"", "and the other knows at once"
