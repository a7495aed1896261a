"""Another user of the host gets nothing of a session: no file, no socket, no server."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import NOBODY, as_nobody, eventually

from ddp_notebook.archive.format import SavedRun
from ddp_notebook.archive.save import write
from ddp_notebook.cluster.channels import EventReceiver
from ddp_notebook.jobs import outside
from ddp_notebook.launch.session_folder import FOLDER_PREFIX, make_folder, sweep_stale_folders
from ddp_notebook.model import CellStarted, Event, Snapshot
from ddp_notebook.rank.collectives import mapped_file
from ddp_notebook.rank.control_socket import ControlSocket, framed
from ddp_notebook.rank.events import EventSender
from ddp_notebook.rank.prepared import job_folder
from ddp_notebook.rank.prepared.job_folder import About
from ddp_notebook.session import Session
from ddp_notebook.testing import pids_of

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.getuid() != 0, reason="only root can be another user here"
)


def refused(do: Callable[[], Any]) -> str:
    """The error of what was tried, by name; empty where it went well."""
    try:
        do()
    except OSError as error:
        return type(error).__name__
    return ""


def connect(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(path)


def test_no_file_and_no_socket_of_a_session_is_open_to_another_user(ranks2: Session) -> None:
    pids = pids_of(ranks2)
    folder = Path(pids["folder"])
    files = [path for path in folder.rglob("*") if not path.is_dir()]
    sockets = [str(path) for path in files if path.is_socket()]
    plain = [path for path in files if path.is_file()]
    assert len(sockets) >= 3 and len(plain) >= 3

    def attack() -> dict[str, list[str]]:
        secrets = [
            Path("/proc", str(pid), "environ") for pid in (pids["controller"], *pids["ranks"])
        ]
        return {
            "list": [refused(lambda: list(folder.iterdir()))],
            "read": [refused(path.read_bytes) for path in (*plain, *secrets)],
            "connect": [refused(lambda each=each: connect(each)) for each in sockets],
            "signal": [refused(lambda pid=pid: os.kill(pid, 0)) for pid in pids["ranks"]],
        }

    for what, answers in as_nobody(attack).items():
        assert answers and all(answers), (what, answers)
    ranks2.run_cell("rank").raise_for_error()


def test_what_another_user_sends_is_dropped_also_where_the_folder_lets_them_in() -> None:
    """The kernel says whose the other end is."""
    heard: list[Event] = []
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # others get there
        receiver = EventReceiver(Path(name), heard.extend)
        Path(name).chmod(0o777)
        Path(name, "events.sock").chmod(0o666)

        def attack() -> bool:
            sender = EventSender(0, receiver.url, receiver.source)
            sender.emit(CellStarted, cell=666)
            return sender.flush()

        assert as_nobody(attack)
        own = EventSender(0, receiver.url, receiver.source)
        own.emit(CellStarted, cell=1)
        eventually(lambda: any(isinstance(event, CellStarted) for event in heard), 10)
        own.close()
        receiver.close()
    assert [event.cell for event in heard if isinstance(event, CellStarted)] == [1]


def test_what_another_user_made_is_neither_opened_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    theirs = tmp_path / f"{FOLDER_PREFIX}theirs"
    theirs.mkdir(mode=0o700)
    (theirs / "lock").touch()
    log = tmp_path / "ring-1"
    log.write_bytes(b"0" * 4096)
    for path in (theirs / "lock", theirs, log):
        os.chown(path, NOBODY, NOBODY)
    sweep_stale_folders()
    assert (theirs / "lock").exists()
    with pytest.raises((OSError, ValueError)):
        mapped_file.open_other(tmp_path, "ring-1", 4096)


@pytest.fixture
def public(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which everybody may write, as /tmp is, and where jobs leave their records."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # others get there
        folder = Path(name)
        folder.chmod(0o777)
        monkeypatch.setenv(job_folder.FOLDER_VARIABLE, str(folder / "jobs"))
        yield folder


def test_a_umask_that_locks_the_user_out_is_named_and_leaves_no_folder(
    public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(public))

    def start() -> str:
        os.umask(0o777)
        try:
            make_folder()
        except OSError as error:
            return str(error)
        return ""

    assert "the umask takes from this user" in as_nobody(start)
    assert not list(public.glob(f"{FOLDER_PREFIX}*"))


def about() -> About:
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    return About(os.getpid(), 5, 1, 3, 0, 2, 0, "train.py", "/", "h", "p", 1.0, False, told)


def test_a_prepared_job_and_a_saved_run_are_closed_to_another_user(public: Path) -> None:
    own = job_folder.make(about())
    assert own is not None
    answered: list[str] = []
    questions = ControlSocket(own / "ask", lambda name, _: {"answer": answered.append(name)})
    questions.listen()
    write(public / "run.json", SavedRun(Snapshot(), Snapshot(), 0), force=False)

    def attack() -> dict[str, str]:
        return {
            "list": refused(lambda: list((public / "jobs").iterdir())),
            "record": refused((own / "about.json").read_bytes),
            "socket": refused(lambda: connect(str(own / "ask"))),
            "run": refused((public / "run.json").read_bytes),
            "all else is open to them": str((public / "theirs").mkdir()),
        }

    def ask_all_the_same() -> list[int]:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(str(own / "ask"))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(framed({"question": "report"}))
                return list(sock.recv(100))
        return []

    try:
        answers = as_nobody(attack)
        assert all(answers.values()), answers
        for path, mode in ((own.parent, 0o755), (own, 0o755), (own / "ask", 0o666)):
            path.chmod(mode)  # as if the folder's protection were gone
        assert as_nobody(ask_all_the_same) == [] and answered == []
    finally:
        questions.close()


def test_root_is_told_that_a_job_of_another_user_answers_that_user_alone() -> None:
    theirs = subprocess.Popen(["cat"], stdin=subprocess.PIPE, user=NOBODY)
    try:
        assert outside.elsewhere(theirs.pid) == (
            f"It is a process of user {NOBODY}, whom alone it answers."
        )
    finally:
        theirs.communicate()


def test_a_job_that_another_user_pretends_to_have_is_not_looked_at(public: Path) -> None:
    root = public / "jobs"

    def pretend() -> bool:
        own = root / f"{os.getppid()}-5"
        own.mkdir(parents=True)
        (own / "about.json").write_text(json.dumps(dataclasses.asdict(about())))
        return True

    assert as_nobody(pretend) and list(root.iterdir())
    assert job_folder.processes() == [] and job_folder.make(about()) is None
    root.rename(public / "theirs")
    assert job_folder.make(about()) is not None
    (public / "theirs" / f"{os.getpid()}-5").rename(root / "1-5")
    assert len(job_folder.processes()) == 1, "and none of a folder of theirs in ours"
