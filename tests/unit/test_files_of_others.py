"""What others leave where files are read: nobody waits for it, is flooded by it, or shows codes."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import socket
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import as_nobody

from ddp_notebook import __main__, files
from ddp_notebook.archive.replay import Replay, is_saved_run
from ddp_notebook.errors import UsageMistake
from ddp_notebook.jobs import hosts, logs, prepared, records
from ddp_notebook.jobs import left as left_by_a_job
from ddp_notebook.jobs.frames import Frame, Sources
from ddp_notebook.jobs.target import Left
from ddp_notebook.jobs.verdict import Outcome
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.rank.inspect import answers
from ddp_notebook.rank.prepared import job_folder
from ddp_notebook.rank.prepared.job_folder import About
from ddp_notebook.rank.setup import rendezvous
from ddp_notebook.session import BenchResult
from ddp_notebook.session.tools.breakpoints import _check_has_line

ROOM_BYTES = 1 << 30


@contextmanager
def at_once() -> Iterator[None]:
    """Neither waits nor takes memory without end."""
    held = signal.signal(signal.SIGALRM, _too_long)
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, before[1]))
    signal.alarm(round(scaled_for_load(30)))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, held)
        resource.setrlimit(resource.RLIMIT_AS, before)


def _too_long(*_: object) -> None:
    raise AssertionError("it waits for a file that somebody left")


@pytest.fixture(params=["FIFO", "link to a device", "link to a FIFO", "folder", "device"])
def left(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """What somebody left as a Python file beside the script."""
    path = tmp_path / "helper.py"
    match request.param:
        case "FIFO":
            os.mkfifo(path)
        case "link to a device":
            path.symlink_to("/dev/zero")
        case "link to a FIFO":
            os.mkfifo(tmp_path / "pipe")
            path.symlink_to(tmp_path / "pipe")
        case "folder":
            path.mkdir()
        case "device":
            path = Path("/dev/zero")
    return path


def test_what_is_no_regular_file_is_not_read_as_code(left: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import helper\n")
    with at_once():
        assert files.sources(script) == {"train.py": "import helper\n"}
        assert files.source(left) == ""
        place = Sources().path((Frame(str(left), 1, "f"),))[0]
    assert place.text == ""


def test_what_is_no_regular_file_is_no_run_and_no_log(left: Path) -> None:
    with at_once():
        assert not is_saved_run(left)
        with pytest.raises(UsageMistake):
            Replay.read(left)
        with pytest.raises(UsageMistake):
            hosts.named([str(left)])
        with pytest.raises(UsageMistake):
            _check_has_line(left, 3)
        with pytest.raises(UsageMistake, match="cannot be read"):
            BenchResult.read(left)
        assert not rendezvous.arguments_of({"init_method": f"file://{left}", "rank": 0}).stale
        assert not answers._store_file(str(left), False, "").claims


@pytest.mark.parametrize("kind", ["FIFO", "link to a device"])
def test_what_is_no_file_in_the_record_of_a_job_holds_no_reader_up(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(job_folder.FOLDER_VARIABLE, str(tmp_path / "jobs"))
    folder = job_folder.make(About(2**22, 5, 1, 3, 0, 2, 0, "a.py", "/", "h", "p", 1.0, False, {}))
    assert folder is not None
    for name in ("splits", "ring-0", "stacks.txt", "end.json", "facts.json", "report.json"):
        os.mkfifo(folder / name) if kind == "FIFO" else (folder / name).symlink_to("/dev/zero")
    with at_once():
        (job,) = records.jobs()
        assert prepared.why(job).outcome is Outcome.UNDECIDED
        (folder / "about.json").unlink()
        os.mkfifo(folder / "about.json")
        assert records.jobs() == []


def test_code_that_is_newer_than_the_job_or_too_long_is_not_shown_as_its(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("x = 1\n")
    assert files.sources(script, before_s=1.0) == {}
    assert files.source(script, most_bytes=5) == ""
    assert files.source(script, most_bytes=6) == "x = 1\n"


def test_the_end_of_a_file_is_read_from_where_it_is_wanted(left: Path, tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_bytes(b"earlier run\xff\nthis run\n")
    assert files.tail(log) == "earlier run\ufffd\nthis run\n"
    assert files.tail(log, 5) == " run\n"
    assert files.tail(log, 4000, begin=13) == "this run\n"
    assert files.tail(log, 4000, begin=99) == files.tail(tmp_path / "gone.log") == ""
    with at_once():
        assert files.tail(left) == ""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user can read, with a log of a job in it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "job.log").write_text(
            "[rank0]: Traceback (most recent call last):\n"
            '[rank0]:   File "/home/me/train.py", line 5, in <module>\n'
            "[rank0]: ValueError: no rows left\n"
        )
        yield folder


def socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def sparse(path: Path, start: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(start)
        stream.truncate(200 << 30)


def closed(path: Path, mode: int) -> None:
    path.mkdir()
    (path / "more.log").touch()
    path.chmod(mode)


UNREADABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "more.log": (lambda path: path.symlink_to("job.log"), "more.log: a link"),
    "elsewhere.log": (lambda path: path.symlink_to("/elsewhere/secret"), "elsewhere.log: a link"),
    "pipe.log": (os.mkfifo, "pipe.log: a pipe, a socket or a device"),
    "socket.log": (socket_at, "socket.log: a pipe, a socket or a device"),
    "rank_1": (lambda path: sparse(path, b"\x80"), "rank_1, which has 214,748,364,800 bytes"),
    "rank1.log": (
        lambda path: sparse(path, b""),
        "rank1.log, which has 214,748,364,800 bytes and no text",
    ),
    "theirs.log": (lambda path: path.touch(mode=0), "theirs.log: Permission denied"),
    "theirs": (lambda path: closed(path, 0), "theirs: Permission denied"),
    "listed": (lambda path: closed(path, 0o744), "more.log: Permission denied"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_noted_beside_what_could(shared: Path, name: str) -> None:
    make, note = UNREADABLE[name]

    def why(folder: Path = shared) -> list[Any]:
        with at_once():
            verdict = Left([folder]).why()
        return [len(verdict.diagnosis.findings), *verdict.unread]

    assert why() == [1]  # and all that it loads is loaded before this is another user
    make(shared / name)
    try:
        assert (as_nobody(why) if os.getuid() == 0 else why()) == [1, f"not read: {note}"]
    finally:
        if name in ("theirs", "listed"):
            (shared / name).chmod(0o700)


def test_a_file_that_is_gone_meanwhile_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / f"rank_0.{name}.log").write_text("train.py: error: no\n")
    (tmp_path / "rank_1.log").write_text("step 1\n")
    looked = Path.lstat

    def removes(path: Path) -> os.stat_result:
        (tmp_path / "rank_0.a.log").unlink(missing_ok=True)
        return looked(path)

    monkeypatch.setattr(Path, "lstat", removes)
    note = "not read: rank_0.a.log: No such file or directory"
    assert left_by_a_job.gather([tmp_path]).unread == (note,)


def test_many_files_that_cannot_be_read_are_one_note(tmp_path: Path) -> None:
    (tmp_path / "rank_1.log").write_text("step 1\n")
    for number in range(2000):
        (tmp_path / f"{number}.log").symlink_to("/elsewhere")
    (note,) = left_by_a_job.gather([tmp_path]).unread
    assert note.startswith("not read: ") and note.endswith(" and 1,997 more: a link")


@pytest.mark.parametrize("name", ["secret/rank_0.log", "link.log"])
def test_a_name_that_leads_where_one_may_not_look_is_refused_in_words(
    shared: Path, name: str
) -> None:
    closed(shared / "secret", 0o700)
    (shared / "secret/rank_0.log").touch()
    (shared / "link.log").symlink_to("secret/rank_0.log")

    def told() -> str:
        try:
            left_by_a_job.gather([shared / name])
        except UsageMistake as mistake:
            return str(mistake)
        return ""

    told()
    if os.getuid() == 0:
        assert as_nobody(told) == f"{shared / name} cannot be read: Permission denied."


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("job.log", b"  rank      : 9000000 (local_rank: 9000000)\n"),
        ("rank_0.log", b"ab\n" * 700_000),
    ],
    ids=["a large number", "short lines"],
)
def test_what_a_log_makes_one_build_is_bounded(tmp_path: Path, name: str, line: bytes) -> None:
    (tmp_path / name).write_bytes(line)
    with at_once():
        (text,) = left_by_a_job.found_in([tmp_path]).logs
        tracemalloc.start()
        logs.read([text])
        _, most_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert most_bytes < 80 << 20


HEAD = b'{"version": "1", "pg_config": {}, "entries": ['


@pytest.mark.parametrize(("values", "files"), [(20_000_000, 1), (1_900_000, 9)])
def test_files_of_many_values_are_built_one_at_a_time_or_not_at_all(
    tmp_path: Path, values: int, files: int
) -> None:
    for rank in range(files):
        (tmp_path / f"rank_{rank}.json").write_bytes(HEAD + b"[]," * values + b"1]}")
    with at_once(), contextlib.suppress(UsageMistake):
        left_by_a_job.gather([tmp_path])


def test_one_entry_that_many_dumps_list_many_times_is_kept_as_often_as_it_can_be(
    tmp_path: Path,
) -> None:
    entry = {"record_id": 1, "process_group": ("0", "default_pg"), "profiling_name": "gloo:x"}
    dump = {"version": "1", "pg_config": {}, "entries": [entry] * 40_000}
    for rank in range(100):
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(dump))
    of = left_by_a_job.found_in([tmp_path]).dumps
    assert [len(of[rank].records) for rank in range(100)] == [10_000] * 100


NO_NAMES = ("a\0b", "a" * 5000, "9" * 5000, "~nobodyhere", "half \ud800", "x:9" * 3000, "\x1b[2J")


@pytest.mark.parametrize("word", NO_NAMES)
def test_what_cannot_be_the_name_of_a_file_is_told_so(word: str) -> None:
    for what in ([word], [word, "more"]):
        with (
            at_once(),
            pytest.raises(UsageMistake, match=r"does not exist|cannot be the|no process|one pid"),
        ):
            hosts.named(what)


@pytest.mark.parametrize("code", ["\x1b[2J", "\x1b]0;title\x07", "\n", "\u202e"])
def test_a_name_that_moves_the_cursor_is_told_as_it_was_given(tmp_path: Path, code: str) -> None:
    with pytest.raises(UsageMistake) as told:
        hosts.named([str(tmp_path / code)])
    shown = code.encode("unicode_escape").decode()
    assert str(told.value).startswith(f"{tmp_path}/{shown} does not exist.")


def _in_a_log(folder: Path, code: str) -> None:
    (folder / f"{code}.bin.json").write_bytes(b"\x80nothing")
    (folder / f"{code}rank0.log").write_text("Traceback\nRuntimeError: no\n")


def _in_a_script(folder: Path, code: str) -> None:
    frame = f'[rank0]:   File "/home/{code}train.py", line 8, in f{code}\n'
    error = f"[rank0]: Val{code}Error: {code}no\n"
    (folder / "job.log").write_text(
        f"[rank0]: Traceback (most recent call last):\n{frame}[rank0]:     x = {code}\n{error}"
    )


@pytest.mark.parametrize("write", [_in_a_log, _in_a_script])
@pytest.mark.parametrize("code", ["\x1b]0;title\x07", "\x1b[2J", "\x9b2J", "\r\x08"])
@pytest.mark.parametrize("verb", ["why", "where"])
def test_no_name_moves_the_cursor_of_a_terminal(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    write: Callable[[Path, str], None],
    code: str,
    verb: str,
) -> None:
    write(tmp_path, code)
    __main__.main([verb, str(tmp_path)])
    _none_in(capsys.readouterr())
    __main__.main([verb, str(tmp_path / f"{code}none")])
    _none_in(capsys.readouterr())


def _none_in(said: Any) -> None:
    for text in (said.out, said.err):
        assert all(character.isprintable() or character == "\n" for character in text), ascii(text)
