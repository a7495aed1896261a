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

from ddp_notebook.evidence.frames import Sources
from ddp_notebook.jobs.outside import recorder
from ddp_notebook.jobs.unprepared import Seen
from ddp_notebook.rank.prepared import processes

SCRIPT = Path("/home/me/train.py")
DUMP = dump(SCRIPT, [("all_reduce", 9, (4,), True), ("barrier", 8, (1,), False)])
TEXT = json.dumps(DUMP).encode()
FACT = "flight recorder of rank 1: collective 1: barrier"


def read(given: dict[str, str], monkeypatch: pytest.MonkeyPatch, began_s: float = 0.0) -> list[str]:
    """What is said of rank 1, this process, that was given this environment."""
    monkeypatch.setattr(processes, "environment", lambda pid: given)
    seen = Seen(os.getpid(), 1, 1, 2, "train.py", began_s)
    return recorder.facts(recorder.read({1: seen}, Sources(0.0)))


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
    found = read({recorder.SOCKET_VARIABLE: path}, monkeypatch)
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
            found = read({recorder.SOCKET_VARIABLE: str(path)}, monkeypatch)
        assert found == []
        assert other.stdout is not None and other.stdout.read() == "0\n", "nothing was sent"


def test_a_dump_is_read_if_the_rank_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {recorder.FILE_VARIABLES[1]: str(tmp_path / "trace_")}
    assert read(given, monkeypatch) == []
    file = tmp_path / "trace_1"
    file.write_bytes(TEXT)
    assert [fact.startswith(FACT) for fact in read(given, monkeypatch)] == [True]
    assert read(given, monkeypatch, began_s=file.stat().st_mtime + 9) == [], "of an earlier job"
    file.write_bytes(TEXT[:-9])
    assert read(given, monkeypatch) == [], "it is being written"


def test_a_rank_that_made_a_pipe_for_it_is_asked_for_its_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread stands for NCCL's, which needs a GPU."""
    stem = tmp_path / "pipe_"
    given = {recorder.PIPE_VARIABLE: str(stem), recorder.FILE_VARIABLES[0]: str(tmp_path / "fr_")}
    os.mkfifo(f"{stem}1.pipe")
    assert read(given, monkeypatch) == [], "no process reads it"
    descriptor = os.open(f"{stem}1.pipe", os.O_RDONLY | os.O_NONBLOCK)
    asked: list[bytes] = []

    def dumps() -> None:
        os.set_blocking(descriptor, True)
        while not (text := os.read(descriptor, 128)):
            pass
        asked.append(text)
        (tmp_path / "fr_1").write_bytes(TEXT)

    thread = threading.Thread(target=dumps, daemon=True)
    thread.start()
    try:
        assert [fact.startswith(FACT) for fact in read(given, monkeypatch)] == [True]
        thread.join(10)
    finally:
        os.close(descriptor)
    assert asked == [b"1"]
    Path(f"{stem}1.pipe").unlink()
    Path(f"{stem}1.pipe").write_bytes(b"mine")
    read(given, monkeypatch)
    assert Path(f"{stem}1.pipe").read_bytes() == b"mine", "a file is not written to"
