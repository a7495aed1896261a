"""Another user of the host gets nothing of a session: no file, no socket, no server."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_notebook.launch import shared_fork_server
from ddp_notebook.launch.session_folder import FOLDER_PREFIX, sweep_stale_folders
from ddp_notebook.rank.collectives import mapped_file
from ddp_notebook.session import Session
from ddp_notebook.testing import pids_of

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.getuid() != 0, reason="only root can be another user here"
)
NOBODY = 65534


def as_nobody(work: Callable[[], Any]) -> Any:
    """What `work` gives in a process of another user, as JSON has it."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(write, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        text = told.read()
    os.waitpid(pid, 0)
    return json.loads(text)


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
    server = shared_fork_server.address(sys.path)

    def attack() -> dict[str, list[str]]:
        secrets = [
            Path("/proc", str(pid), "environ") for pid in (pids["controller"], *pids["ranks"])
        ]
        return {
            "list": [refused(lambda: list(folder.iterdir()))],
            "read": [refused(path.read_bytes) for path in (*plain, *secrets)],
            "connect": [refused(lambda each=each: connect(each)) for each in (*sockets, server)],
            "ask": ["" if shared_fork_server.request(server) is not None else "refused"],
            "signal": [refused(lambda pid=pid: os.kill(pid, 0)) for pid in pids["ranks"]],
        }

    for what, answers in as_nobody(attack).items():
        assert answers and all(answers), (what, answers)
    ranks2.run_cell("rank").raise_for_error()


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
