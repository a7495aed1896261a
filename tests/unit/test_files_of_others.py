"""What others leave where files are read: nobody waits for it, is flooded by it, or shows codes."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ddp_notebook import __main__, files
from ddp_notebook.archive.replay import Replay, is_saved_run
from ddp_notebook.errors import UsageMistake
from ddp_notebook.jobs import hosts, prepared, records
from ddp_notebook.jobs.frames import Frame, Sources
from ddp_notebook.jobs.verdict import Outcome
from ddp_notebook.rank.prepared import job_folder
from ddp_notebook.rank.prepared.job_folder import About
from ddp_notebook.session.tools.breakpoints import _check_has_line

ROOM_BYTES = 1 << 30


@contextmanager
def at_once() -> Iterator[None]:
    """Neither waits nor takes memory without end."""
    held = signal.signal(signal.SIGALRM, _too_long)
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, before[1]))
    signal.alarm(10)
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
