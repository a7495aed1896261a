"""Questions at unix sockets: who answers, who is left out, and who does not get in."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_notebook.cluster import questions
from ddp_notebook.cluster.channels import EventReceiver
from ddp_notebook.cluster.questions import ask
from ddp_notebook.rank import control_socket
from ddp_notebook.rank.calls import CannotAnswer, Nothing, Question
from ddp_notebook.rank.control_socket import ControlSocket, framed


@dataclass(frozen=True)
class Name:
    name: str


HELLO = Question("hello", Nothing, Name)
MUCH = Question("much", Nothing, Name)


def answer(question: str, about: Mapping[str, Any]) -> Mapping[str, Any]:
    names = {"hello": "me", "much": "x" * 300_000}
    return {"answer": {"name": names[question]}} if question in names else {"error": "what?"}


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[ControlSocket]:
    listening = ControlSocket(tmp_path / "ask", answer)
    listening.listen()
    yield listening
    listening.close()
    assert not listening.path.exists()


def test_it_answers_and_only_this_user_gets_in(listening: ControlSocket) -> None:
    assert ask({3: listening.path}, HELLO, Nothing(), 5.0) == {3: Name("me")}
    assert stat.S_IMODE(listening.path.stat().st_mode) == 0o600
    assert ask({0: listening.path}, MUCH, Nothing(), 5.0) == {0: Name("x" * 300_000)}
    unknown = Question("unknown", Nothing, Name)
    assert ask({0: listening.path}, unknown, Nothing(), 5.0) == {0: CannotAnswer("what?")}


def test_an_answer_that_is_there_counts_though_who_asked_gets_no_core_until_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(framed({"answer": {"name": "me"}}))
        answered.set()

    def late() -> float:
        return 99.0 if begun and answered.wait(60) else begun.append(1) or 0.0

    begun: list[int] = []
    monkeypatch.setattr(questions, "time", SimpleNamespace(monotonic=late))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "ask"))
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        assert ask({0: tmp_path / "ask"}, HELLO, Nothing(), 1.0) == {0: Name("me")}
        thread.join(60)


def test_a_path_longer_than_an_address_can_be_serves(tmp_path: Path) -> None:
    folder = tmp_path / ("a" * 100) / ("b" * 100)
    folder.mkdir(0o700, parents=True)
    far = ControlSocket(folder / "ask", answer)
    far.listen()
    assert ask({3: far.path}, HELLO, Nothing(), 5.0) == {3: Name("me")}
    assert stat.S_IMODE(far.path.stat().st_mode) == 0o600
    assert ask({3: far.path.with_name("none")}, HELLO, Nothing(), 5.0) == {}
    far.close()
    assert not far.path.exists()


def test_questions_that_are_none_do_not_end_the_answering(listening: ControlSocket) -> None:
    for content in (b"[" * 60_000, b'{"question": "hello", "about": [1]}', b"[1]", b"\xff", b""):
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(str(listening.path))
            asking.sendall(len(content).to_bytes(4, "big") + content)
            assert asking.recv(1 << 16) == b""
    assert ask({3: listening.path}, HELLO, Nothing(), 5.0) == {3: Name("me")}


def test_nobody_listens_or_asks_in_a_folder_that_others_can_enter(
    listening: ControlSocket, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    try:
        assert ask({0: listening.path}, HELLO, Nothing(), 5.0) == {}
        with pytest.raises(PermissionError, match="others can enter"):
            ControlSocket(tmp_path / "new", answer).listen()
        with pytest.raises(PermissionError, match="others can enter"):
            EventReceiver(tmp_path, lambda _: None)
    finally:
        tmp_path.chmod(0o700)


def test_another_users_questions_are_not_read(
    listening: ControlSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_socket, "is_mine", lambda _: False)
    assert ask({0: listening.path}, HELLO, Nothing(), 5.0) == {}


def test_who_does_not_listen_or_answer_is_left_out_in_time(
    listening: ControlSocket, tmp_path: Path
) -> None:
    silent = socket.socket(socket.AF_UNIX)
    silent.bind(str(tmp_path / "silent"))
    silent.listen()
    nobody = socket.socket(socket.AF_UNIX)
    nobody.bind(str(tmp_path / "nobody"))  # as a killed process leaves it
    paths = {
        0: listening.path,
        1: tmp_path / "silent",
        2: tmp_path / "nobody",
        3: tmp_path / "not there",
    }
    began_s = time.monotonic()
    assert ask(paths, HELLO, Nothing(), 0.3) == {0: Name("me")}
    assert time.monotonic() - began_s < 30.0  # not for ever
    silent.close()
    nobody.close()


def test_a_damaged_question_harms_nobody(listening: ControlSocket) -> None:
    for sent in (b"", b"\0", b"\xff\xff\xff\xff", b"\0\0\0\2{]", b"\0\0\0\1[", b"\0\0\0\2[]"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(listening.path))
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(5)
            assert connection.recv(1) == b""
    assert ask({0: listening.path}, HELLO, Nothing(), 5.0) == {0: Name("me")}


def test_a_fork_does_not_seem_to_listen(tmp_path: Path) -> None:
    listening = ControlSocket(tmp_path / "ask", answer)
    listening.listen()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(read, 1)
        os._exit(0)
    assert listening._listener is not None
    listening._listener.shutdown(socket.SHUT_RDWR)  # as its end would
    listening._leave()
    try:
        began_s = time.monotonic()
        assert ask({0: listening.path}, HELLO, Nothing(), 120.0) == {}
        assert time.monotonic() - began_s < 60.0  # not until the time that it may take
    finally:
        os.write(write, b".")
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)


def test_many_ask_at_once(listening: ControlSocket) -> None:
    answers: list[object] = []
    threads = [
        threading.Thread(
            target=lambda: answers.append(ask({0: listening.path}, HELLO, Nothing(), 5.0))
        )
        for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [{0: Name("me")}] * 20
