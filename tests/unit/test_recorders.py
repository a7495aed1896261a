"""torch's flight recorder of ranks that run: read where they give it away, and nothing else is."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import eventually
from test_dead_jobs import dump

from ddp_notebook.jobs import dumps
from ddp_notebook.jobs.frames import Sources
from ddp_notebook.rank.prepared import processes

SCRIPT = Path("/home/me/train.py")
DUMP = dump(SCRIPT, [("all_reduce", 9, (4,), True), ("barrier", 8, (1,), False)])
TEXT = json.dumps(DUMP).encode()
FACT = "flight recorder of rank 1: collective 1: barrier"


def read(given: dict[str, str], monkeypatch: pytest.MonkeyPatch, began_s: float = 0.0) -> list[str]:
    """What is said of rank 1, this process, that was given this environment."""
    monkeypatch.setattr(processes, "environment", lambda pid: given)
    return dumps.facts(dumps.recorded({1: (os.getpid(), began_s)}, Sources(0.0)))


def answering(path: str, answer: bytes) -> Callable[[], None]:
    """Have something at `path` answer once; what waits for its end."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen()

    def answers() -> None:
        with listener:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

    thread = threading.Thread(target=answers, daemon=True)
    thread.start()
    return lambda: thread.join(10)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: "


@pytest.mark.parametrize(
    ("answer", "known"),
    [
        (HEAD + str(len(TEXT)).encode() + b"\r\n\r\n" + TEXT, True),
        (HEAD + b"999999\r\n\r\n" + TEXT[:-9], False),
        (HEAD + b"2\r\n\r\n{}", False),
        (b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n", False),
        (b"\x00" * 999, False),
        (b"", False),
    ],
)
def test_a_worker_server_is_asked_and_may_answer_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes, known: bool
) -> None:
    path = str(tmp_path / "server")
    wait = answering(path, answer)
    found = read({dumps.SOCKET_VARIABLE: path}, monkeypatch)
    wait()
    assert [fact.startswith(FACT) for fact in found] == [True] * known


def test_a_socket_of_another_process_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks may have been told the same path: the last one listens there."""
    path = tmp_path / "server"
    listens = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen();"
        "c = s.accept()[0]; print(len(c.recv(9)))"
    )
    command = [sys.executable, "-c", listens, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        eventually(path.exists, 30)
        found: Any = []
        while not found and other.poll() is None:
            found = read({dumps.SOCKET_VARIABLE: str(path)}, monkeypatch)
        assert found == []
        assert other.stdout is not None and other.stdout.read() == "0\n", "nothing was sent"


def test_a_dump_is_read_if_the_rank_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {dumps.FILE_VARIABLES[1]: str(tmp_path / "trace_")}
    assert read(given, monkeypatch) == []
    file = tmp_path / "trace_1"
    file.write_bytes(TEXT)
    assert [fact.startswith(FACT) for fact in read(given, monkeypatch)] == [True]
    assert read(given, monkeypatch, began_s=file.stat().st_mtime + 9) == [], "of an earlier job"
    file.write_bytes(TEXT[:-9])
    assert read(given, monkeypatch) == [], "it is being written"
