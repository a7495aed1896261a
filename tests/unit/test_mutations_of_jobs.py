"""Whatever stands in what jobs leave, answer or are asked: no raw error, and nothing hangs.

`hostile` says how often each is tried.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import pickle
import socket
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hostile import HOSTILE, as_json, changed, changes, often, sendable, within
from hypothesis import given
from hypothesis import strategies as st
from test_dead_jobs import MARKS, dump, raised

from ddp_notebook.cluster.questions import ask
from ddp_notebook.errors import UsageMistake
from ddp_notebook.jobs import commandline, find, hosts, outside, pyspy, records, target
from ddp_notebook.jobs.verdict import places_to_json
from ddp_notebook.model import Activity, Place, RankReport, RunFacts, codec
from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import CannotAnswer
from ddp_notebook.rank.control_socket import ControlSocket, framed
from ddp_notebook.rank.prepared import job_folder
from ddp_notebook.rank.prepared.job_folder import About
from ddp_notebook.views.notebook import mime_bundle

_numbers = itertools.count()


def looked_at(target: target.Target) -> None:
    """All that can be asked of a job, and nothing of it moves a cursor."""
    try:
        verdict = target.why()
    except UsageMistake:
        return
    sendable(verdict.to_json("a job"))
    sendable(mime_bundle(verdict.diagnosis))
    sendable(places_to_json(target.places()))
    asked = argparse.Namespace(
        target=["-"], slurm=None, stacks=False, locals=False, ranks=None, json=False
    )
    with (
        mock.patch.object(commandline.hosts, "named", return_value=target),
        contextlib.redirect_stdout(io.StringIO()) as places,
    ):
        commandline._where(asked)
    words = commandline.as_text(verdict), places.getvalue()
    for text in (*words, target.name, target.about):
        assert "\x1b" not in text and "\0" not in text, ascii(text)
        sendable(text)
    try:
        sendable(mime_bundle(target.board()))
        sendable(mime_bundle(target.where()))
    except UsageMistake:
        pass


# --------------------------------------------------------------------------- dumps and logs

pytestmark = within

_SCRIPT = Path("/home/me/train.py")
_CALLS = [("all_reduce", 9, (4,), True), ("barrier", 8, (1,), False)]
STRAY = st.tuples(st.integers(0, 1 << 16), st.binary(min_size=1, max_size=8))
DUMP = json.loads(json.dumps(dump(_SCRIPT, _CALLS)))


@given(changes(DUMP), st.booleans(), st.lists(STRAY, max_size=2))
@often
def test_a_dump_is_judged_or_refused_in_words(
    tmp_path: Path, made: list[tuple[Any, ...]], plain: bool, stray: list[tuple[int, bytes]]
) -> None:
    folder = tmp_path / str(next(_numbers))
    folder.mkdir()
    for rank in range(2):
        wire = changed(DUMP, made) if rank else DUMP
        data = bytearray(as_json(wire) if plain else pickle.dumps(wire))
        for at, piece in stray if rank else ():
            start = at % len(data)
            data[start : start + len(piece)] = piece
        (folder / f"nccl_trace_rank_{rank}").write_bytes(data)
    read(folder)


WRITTEN = [
    (rank, line.removeprefix(f"[rank{rank}]: "))
    for rank, text in (
        (0, raised(0, 5, "RuntimeError: Connection closed by peer [127.0.0.1]:9")),
        (1, raised(1, 8, "V: no")),
    )
    for line in text.splitlines()
]
LOGS = ["".join(mark.format(*line) + "\n" for line in WRITTEN) for mark in MARKS.values()]
TEXTS = [
    *(text for text in HOSTILE if isinstance(text, str)),
    *("[default99999999]:", "[rank-1]: ", "[1,1]<stderr>:", "9" * 7 + ": ", "(A pid=1) " * 9, "| "),
]
PUT = st.tuples(st.integers(0, 400), st.sampled_from(TEXTS))


@given(st.sampled_from(LOGS), st.lists(PUT, max_size=3))
@often
def test_a_log_is_judged_or_refused_in_words(
    tmp_path: Path, text: str, put: list[tuple[int, str]]
) -> None:
    folder = tmp_path / str(next(_numbers))
    folder.mkdir()
    for at, piece in put:
        text = text[:at] + piece + text[at:]
    (folder / "job.log").write_bytes(text.encode("utf-8", "surrogatepass"))
    read(folder)


def read(folder: Path) -> None:
    try:
        target = hosts.named([str(folder)])
    except UsageMistake as refused:
        assert "\x1b" not in str(refused)
        sendable(str(refused))
        return
    looked_at(target)


# --------------------------------------------------------------------------- prepared jobs


def _about(rank: int) -> dict[str, Any]:
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    pid = (1 << 22) + 1 + rank
    return asdict(
        About(pid, 5, 7, 3, rank, 2, 0, "/home/me/train.py", "/home/me", "h", "p", 1.0, False, told)
    )


_AT = (Place("train.py", 8, "step", "dist.barrier()"),)
_REPORT = RankReport(0, Activity.WAITING, doing="waits", path=_AT, inside="collective", entered=1)
_ERROR = {"type": "ValueError", "text": "no", "frames": [["/home/me/train.py", 3, "f", "x = 1"]]}
JOB = {
    "about.json": _about(1),
    "report.json": {"counts": [0, 1], "report": codec.encode(_REPORT)},
    "end.json": {"error": _ERROR},
    "facts.json": {"facts": codec.encode(RunFacts(1))},
}


@given(changes(JOB), st.booleans())
@often
def test_what_a_prepared_process_left_is_read_as_far_as_it_is_sound(
    tmp_path_factory: pytest.TempPathFactory, made: list[tuple[Any, ...]], failed: bool
) -> None:
    root = tmp_path_factory.mktemp("jobs")
    root.chmod(0o700)
    wire = changed(JOB, made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(job_folder.FOLDER_VARIABLE, str(root))
        for rank, left in enumerate(({"about.json": _about(0)}, wire)):
            own = root / f"{rank}-5"
            own.mkdir(mode=0o700)
            for name, content in left.items():
                if failed or name != "end.json":
                    (own / name).write_bytes(as_json(content))
        # Others of this host are no part of the record, and take longest to look for.
        patch.setattr(outside, "jobs", lambda prepared: [])
        jobs = find.listed()
        sendable(find.to_json(jobs))
        assert "\x1b" not in find.text(jobs)
        for job in records.jobs():
            looked_at(target.Prepared(job, job.first.pid))


# --------------------------------------------------------------------------- questions


ANSWER = {"answer": codec.encode(_REPORT)}


@given(changes(ANSWER))
@often
def test_an_answer_is_taken_or_said_to_be_unreadable(
    tmp_path_factory: pytest.TempPathFactory, made: list[tuple[Any, ...]]
) -> None:
    path = tmp_path_factory.mktemp("a") / "ask"
    data = as_json(changed(ANSWER, made))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(len(data).to_bytes(4, "big") + data)

        thread = threading.Thread(target=answer)
        thread.start()
        answers = ask({0: path}, calls.REPORT, calls.Nothing(), 5.0)
        thread.join()
    assert isinstance(answers[0], RankReport | CannotAnswer)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("s") / "ask"

    def answer(question: str, about: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"answer": [question, dict(about)]}

    made = ControlSocket(path, answer)
    made.listen()
    yield path
    made.close()


_QUESTION = {"question": "report", "about": {"ranks": [0, 1]}}


@given(changes(_QUESTION), st.lists(STRAY, max_size=1))
@often
def test_a_question_is_answered_or_not_and_the_next_one_is(
    asked: Path, made: list[tuple[Any, ...]], stray: list[tuple[int, bytes]]
) -> None:
    content = as_json(changed(_QUESTION, made))
    data = bytearray(len(content).to_bytes(4, "big") + content)
    for at, piece in stray:
        data[at % len(data)] = piece[0]
    for message in (bytes(data), framed({"question": "next", "about": {}})):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(3)
            connection.connect(str(asked))
            got = b""
            with contextlib.suppress(ConnectionError):  # of a question that was not read to its end
                connection.sendall(message)
                connection.shutdown(socket.SHUT_WR)
                got = connection.recv(1 << 20)
    assert b"next" in got


# --------------------------------------------------------------------------- py-spy

_FRAME = {"name": "f", "filename": "/a/train.py", "line": 3, "locals": [{"name": "x", "repr": "1"}]}
_THREAD = {"thread_name": "MainThread", "os_thread_id": 7, "frames": [_FRAME, _FRAME]}
SPIED = {"threads": [_THREAD, _THREAD]}


@given(changes(SPIED))
@often
def test_what_py_spy_prints_is_read_as_far_as_it_is_sound(made: list[tuple[Any, ...]]) -> None:
    threads = pyspy.parse(as_json(changed(SPIED, made).get("threads")), 7)
    assert all(isinstance(thread, pyspy.Thread) for thread in threads)
