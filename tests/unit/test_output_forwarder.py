"""What a rank's code prints, on its way to the notebook."""

from __future__ import annotations

import errno
import io
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from ddp_notebook.model import OutputKind
from ddp_notebook.rank.cells import scripts
from ddp_notebook.rank.cells.output import (
    FAST_PATH_POLL_S,
    FAST_PATH_WRITES,
    LIMIT_BYTES,
    TAIL_BYTES,
    OutputForwarder,
    RankStream,
)
from ddp_notebook.rank.component import Run


class Voice:
    """Stands in for the event sender; records what it is given."""

    rank = 0

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []

    def emit(self, kind: type, **fields: Any) -> None:
        self.said.append(fields)

    def wake(self) -> None:
        """Nobody sends here."""

    @property
    def text(self) -> str:
        return "".join(fields.get("text", "") for fields in self.said)


@pytest.fixture
def voice() -> Voice:
    return Voice()


@pytest.fixture
def forwarder(voice: Voice, tmp_path: Path) -> OutputForwarder:
    (tmp_path / "rank.log").touch()
    return OutputForwarder(voice, {tmp_path / "rank.log": OutputKind.STDOUT}, tmp_path)  # type: ignore[arg-type]


def stream(forwarder: OutputForwarder, what: OutputKind = OutputKind.STDOUT) -> RankStream:
    return RankStream(forwarder, what, io.StringIO(), 1)


def test_what_is_printed_in_a_cell_is_sent_in_order(
    forwarder: OutputForwarder, voice: Voice
) -> None:
    out, err = stream(forwarder), stream(forwarder, OutputKind.STDERR)
    forwarder.run_begins(Run(3))
    print("one", file=out)
    print("two", file=err)
    print("three", file=out)
    forwarder.run_ends()
    assert [(f["what"], f["text"]) for f in voice.said] == [
        (OutputKind.STDOUT, "one\n"),
        (OutputKind.STDERR, "two\n"),
        (OutputKind.STDOUT, "three\n"),
    ]
    assert {f["cell"] for f in voice.said} == {3}


def test_what_a_thread_of_the_users_writes_between_cells_is_shown_with_the_next(
    forwarder: OutputForwarder, voice: Voice
) -> None:
    out, err = stream(forwarder), stream(forwarder, OutputKind.STDERR)
    forwarder.run_begins(Run(3))
    forwarder.run_ends()
    late = threading.Thread(target=lambda: (print("late", file=out), print("error", file=err)))
    late.start()
    late.join()
    print("ours", file=out)
    assert voice.text == ""
    forwarder.run_begins(Run(4))
    print("next", file=out)
    forwarder.run_ends()
    assert voice.text == "[written by threads since the last cell:]\nlate\nerror\nnext\n"
    assert {fields["cell"] for fields in voice.said} == {4}


def test_what_is_printed_outside_of_a_cell_goes_where_it_went_before(
    forwarder: OutputForwarder,
) -> None:
    idle = io.StringIO()
    out = RankStream(forwarder, OutputKind.STDOUT, idle, 1)
    print("hello", file=out)
    assert idle.getvalue() == "hello\n"


def test_what_c_code_and_subprocesses_write_is_found_in_the_log(
    forwarder: OutputForwarder, voice: Voice, tmp_path: Path
) -> None:
    with (tmp_path / "rank.log").open("a") as log:
        log.write("before the cell\n")
    forwarder.run_begins(Run(1))
    with (tmp_path / "rank.log").open("a") as log:
        log.write("from C\n")
    forwarder.run_ends()
    assert voice.text == "from C\n"


def test_a_flood_is_cut_and_all_of_it_is_kept_in_a_file(
    forwarder: OutputForwarder, voice: Voice, tmp_path: Path
) -> None:
    out = stream(forwarder)
    forwarder.run_begins(Run(7))
    lines = [f"line {number}\n" for number in range(400_000)]
    for line in lines:
        out.write(line)
    forwarder.run_ends()
    withheld = forwarder.withheld_bytes
    whole = "".join(lines)
    sent = voice.text
    assert len(sent.encode()) <= LIMIT_BYTES + 100
    assert sent.startswith("line 0\nline 1\n")
    assert sent.endswith(whole[-TAIL_BYTES + 10 :])
    assert f"{withheld:,} bytes not shown" in sent
    assert withheld == pytest.approx(len(whole) - LIMIT_BYTES, abs=TAIL_BYTES)
    assert (tmp_path / "rank-0-cell-7.txt").read_text() == whole


def test_output_below_the_limit_touches_no_disk(forwarder: OutputForwarder, tmp_path: Path) -> None:
    out = stream(forwarder)
    forwarder.run_begins(Run(1))
    out.write("x" * (LIMIT_BYTES - TAIL_BYTES))
    forwarder.run_ends()
    assert forwarder.withheld_bytes == 0
    assert [path.name for path in tmp_path.iterdir()] == ["rank.log"]


def test_a_flood_keeps_the_order_of_both_streams(forwarder: OutputForwarder, voice: Voice) -> None:
    out, err = stream(forwarder), stream(forwarder, OutputKind.STDERR)
    forwarder.run_begins(Run(1))
    for _ in range(FAST_PATH_WRITES + 1):
        out.write(".")
    assert forwarder.collect() == FAST_PATH_POLL_S
    written = ""
    for number in range(300):
        print(number, file=out)
        written += f"{number}\n"
        if number % 100 == 50:
            print("now", number, file=err)
            forwarder.collect()
    forwarder.run_ends()
    texts = dict.fromkeys((OutputKind.STDOUT, OutputKind.STDERR), "")
    for fields in voice.said:
        texts[fields["what"]] += fields["text"]
    assert texts[OutputKind.STDOUT] == "." * (FAST_PATH_WRITES + 1) + written
    assert texts[OutputKind.STDERR] == "now 50\nnow 150\nnow 250\n"


def test_after_a_flood_a_single_line_is_sent_at_once_again(
    forwarder: OutputForwarder, voice: Voice
) -> None:
    out = stream(forwarder)
    forwarder.run_begins(Run(1))
    for _ in range(FAST_PATH_WRITES + 1):
        out.write(".")
    polls = 0
    while forwarder.collect() is not None:
        polls += 1
        assert polls < 100
    out.write("calm")
    assert forwarder.woken
    forwarder.run_ends()
    assert voice.text.endswith("calm")


def test_writers_in_two_threads_lose_nothing_in_a_flood(
    forwarder: OutputForwarder, voice: Voice
) -> None:
    out = stream(forwarder)
    forwarder.run_begins(Run(1))
    done = threading.Event()

    def collector() -> None:
        while not done.is_set():
            forwarder.collect()

    thread = threading.Thread(target=collector)
    thread.start()
    for number in range(60_000):
        out.write(f"{number}\n")
    done.set()
    thread.join()
    forwarder.run_ends()
    assert voice.text == "".join(f"{number}\n" for number in range(60_000))


def test_only_text_can_be_written(forwarder: OutputForwarder) -> None:
    with pytest.raises(TypeError, match="must be str, not bytes"):
        stream(forwarder).write(b"x")  # type: ignore[arg-type]


def test_what_a_script_prints_is_counted_also_before_the_end_of_its_line(tmp_path: Path) -> None:
    """A rule of evaluations asks whether a rank printed something after one."""
    fd = os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY)
    stream = scripts._Stream(fd)
    before = stream.printed()
    assert stream.printed() == before, "nothing was printed"
    print("accuracy 0.5", end="", file=stream)
    assert stream.printed() > before and (tmp_path / "log").read_text() == "accuracy 0.5"
    os.close(fd)


def test_a_script_that_left_no_file_descriptor_ends_with_its_own_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        scripts._be_mute()
