"""The file in which a rank writes down its collectives."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_notebook.model import Collective, Phase, collective_log
from ddp_notebook.session.collective_logs import CollectiveLogs

SIZES = st.lists(st.integers(0, 2**31), max_size=10)


def empty_file() -> mmap.mmap:
    return mmap.mmap(-1, collective_log.FILE_BYTES)


def begin(file: mmap.mmap, run: int = 1) -> None:
    collective_log.HEADER.pack_into(file, 0, collective_log.MAGIC, run, 0, 0)


def put_text(file: mmap.mmap, line: bytes) -> None:
    used = collective_log.HEADER.unpack_from(file)[3]
    file[collective_log.TEXTS_FROM + used : collective_log.TEXTS_FROM + used + len(line)] = line
    header = list(collective_log.HEADER.unpack_from(file))
    header[3] = used + len(line)
    collective_log.HEADER.pack_into(file, 0, *header)


def put_record(file: mmap.mmap, number: int, shape: list[int], phase: Phase) -> None:
    at = (
        collective_log.RECORDS_FROM + number % collective_log.CAPACITY * collective_log.RECORD_BYTES
    )
    sizes = (*shape, *(0,) * collective_log.DIMENSIONS)[: collective_log.DIMENSIONS]
    collective_log.HEAD.pack_into(file, at, number + 1, number, 100 + number, 0, 4)
    rest = (6, 24, 2, 1, 0, 4, 1, 3, 0, 0, collective_log.PHASES.index(phase))
    collective_log.REST.pack_into(
        file,
        at + collective_log.HEAD.size,
        *rest,
        min(len(shape), 8),
        0,
        1,
        collective_log.NOBODY,
        3,
        -5,
        *sizes,
        0,
        0,
    )
    header = list(collective_log.HEADER.unpack_from(file))
    header[2] = number + 1
    collective_log.HEADER.pack_into(file, 0, *header)


def with_texts() -> mmap.mmap:
    file = empty_file()
    begin(file)
    put_text(file, b'"send"\n')
    put_text(file, b'[["train.py", 41, "step", "dist.send(x, 3)"]]\n')
    put_text(file, b'"float32"\n')
    put_text(file, b'{"group": "default", "members": [0, 1, 2, 3]}\n')
    return file


@given(SIZES, st.sampled_from(Phase))
def test_a_record_is_read_as_it_was_written(shape: list[int], phase: Phase) -> None:
    file = with_texts()
    put_record(file, 0, shape, phase)
    found = collective_log.read(memoryview(file), 2)
    (record,) = found.records
    assert (record.rank, record.number, record.operation) == (2, 0, "send")
    assert (record.shape, record.phase) == (tuple(shape[: collective_log.DIMENSIONS]), phase)
    assert (record.root, record.peer, record.tag) == (None, 3, -5)
    assert str(record.place) == "train.py, line 41, in step"
    assert found.groups == {"default": (0, 1, 2, 3)}


@pytest.mark.parametrize(
    "count",
    [1, 5, collective_log.CAPACITY, collective_log.CAPACITY + 1, 3 * collective_log.CAPACITY],
)
def test_the_newest_records_are_kept(count: int) -> None:
    file = with_texts()
    for number in range(max(0, count - collective_log.CAPACITY - 10), count):
        put_record(file, number, [2], Phase.DONE)
    found = collective_log.read(memoryview(file), 0)
    numbers = [record.number for record in found.records]
    assert numbers == list(range(found.first, count))
    assert len(numbers) >= min(count, collective_log.CAPACITY) - 1
    assert [r.number for r in collective_log.read(memoryview(file), 0, last=1).records] == [
        count - 1
    ]


@pytest.mark.parametrize("data", [b"", b"x" * 100, bytes(collective_log.FILE_BYTES)])
def test_what_is_no_ring_reads_as_an_empty_one(data: bytes) -> None:
    assert collective_log.read(data, 0) == collective_log.LogTail()


@given(st.binary(min_size=collective_log.REST.size, max_size=collective_log.REST.size))
def test_a_record_that_something_else_wrote_over_is_read_too(rest: bytes) -> None:
    file = with_texts()
    put_record(file, 0, [2, 3], Phase.DONE)
    at = collective_log.RECORDS_FROM + collective_log.HEAD.size
    file[at : at + collective_log.REST.size] = rest
    (record,) = collective_log.read(file, 1).records
    assert (record.rank, record.number, record.slot) == (1, 0, 0)
    assert all(isinstance(each, str) for each in (record.operation, record.group, record.dtype))


@given(
    st.binary().map(lambda line: line.replace(b"\n", b""))
    | st.sampled_from([b"[1]", b'[["a.py"]]', b'[["a.py", "1", "", ""]]', b'{"group": "default"}'])
    | st.sampled_from(
        [b'{"members": [0]}', b'{"group": [], "members": 1}', b"1", b"null", b"[" * 9]
    )
)
def test_a_text_that_something_else_wrote_over_is_none(line: bytes) -> None:
    file = empty_file()
    begin(file)
    for _ in range(4):
        put_text(file, line + b"\n")
    put_record(file, 0, [2, 3], Phase.DONE)
    (record,) = collective_log.read(file, 1).records
    assert (record.path, record.group) == ((), "")


def test_a_text_that_is_not_there_is_empty() -> None:
    file = empty_file()
    begin(file)
    put_record(file, 0, [2], Phase.ISSUED)
    (record,) = collective_log.read(memoryview(file), 0).records
    assert record == Collective(
        0,
        0,
        "",
        group="",
        shape=(2,),
        numel=6,
        bytes=24,
        peer=3,
        tag=-5,
        issued_ns=100,
        backwards=4,
    )


def test_a_reader_never_sees_half_a_record_while_the_writer_goes_on(tmp_path: Path) -> None:
    from ddp_notebook.rank.collectives.log_writer import LogWriter  # of ranks alone

    writer = LogWriter(tmp_path / "ring")
    stop = threading.Event()
    group = writer.text("g", {"group": "default", "members": [0]})

    def write() -> None:
        number = 0
        while not stop.is_set():
            sizes = (number % 97, *(0,) * 7)
            rest = collective_log.REST.pack(
                number % 97, 0, 0, 0, 0, group, 0, 0, 0, 0, 1, 1, 0, 1, -1, -1, 0, *sizes, 0, 0
            )
            number = writer.write(number, number, rest) + 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        seen = 0
        while seen < 50:
            found = collective_log.read((tmp_path / "ring").read_bytes(), 0, last=200)
            for record in found.records:
                assert record.slot == record.number == record.issued_ns
                assert record.shape == (record.number % 97,) and record.numel == record.shape[0]
            seen += bool(found.records)
    finally:
        stop.set()
        thread.join()


def test_two_threads_that_add_texts_at_once_get_a_number_and_a_place_each(tmp_path: Path) -> None:
    from ddp_notebook.rank.collectives.log_writer import LogWriter

    writer = LogWriter(tmp_path / "ring")
    mapped, writes, is_over = writer._map, threading.Event(), threading.Event()

    class Slow:
        """Holds the first thread up, where it has chosen its place, until the second is through."""

        def __setitem__(self, place: slice, line: bytes) -> None:
            if not writes.is_set():
                writes.set()
                is_over.wait(0.3)  # or until it is clear that the second waits for the first
            mapped[place] = line

    writer._map = Slow()  # type: ignore[assignment]
    numbers: dict[str, int] = {}
    first = threading.Thread(target=lambda: numbers.update(first=writer.text("first", "first")))
    first.start()
    assert writes.wait(5)
    numbers["second"] = writer.text("second", "second")
    is_over.set()
    first.join()
    texts = collective_log.read((tmp_path / "ring").read_bytes(), 0).texts
    assert {name: texts[number] for name, number in numbers.items()} == {n: n for n in numbers}


def test_a_mark_on_a_record_that_is_gone_changes_nothing(tmp_path: Path) -> None:
    from ddp_notebook.rank.collectives.log_writer import LogWriter

    writer = LogWriter(tmp_path / "ring")
    rest = collective_log.REST.pack(*(0,) * 11, 0, 0, 1, -1, -1, 0, *(0,) * 10)
    for number in range(collective_log.CAPACITY + 3):
        writer.write(number, number, rest)
    writer.mark(1, Phase.FAILED, 5)
    writer.mark(collective_log.CAPACITY + 2, Phase.DONE, 9)
    records = collective_log.read((tmp_path / "ring").read_bytes(), 0).records
    assert {record.phase for record in records[:-1]} == {collective_log.PHASES[0]}
    assert (records[-1].phase, records[-1].done_ns) == (Phase.DONE, 9)


def test_a_script_that_starts_while_a_log_is_opened_is_read_from_its_own_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The board opened a rank's log as a script took its place: the script's was never read."""
    own, script = tmp_path / "own", tmp_path / "script"
    for folder, run in ((own, 0), (script, 1)):
        folder.mkdir()
        file = empty_file()
        begin(file, run)
        put_record(file, 0, [2], Phase.DONE)
        begun = list(collective_log.HEADER.unpack_from(file))
        collective_log.HEADER.pack_into(file, 0, *begun[:2], 1, begun[3])
        (folder / "ring-0").write_bytes(file[:])
    logs = CollectiveLogs(own)
    opened = os.open

    def lent_meanwhile(path: Path, flags: int) -> int:
        monkeypatch.undo()
        logs.lend((0,), script)
        return opened(path, flags)

    monkeypatch.setattr(os, "open", lent_meanwhile)
    try:
        logs.written((0,))
        assert logs.written((0,)) == ((1, 1),)
        assert len(logs.read((0,), 1).of[0]) == 1
        logs.take_back((0,))
        assert logs.written((0,)) == ((0, 1),)
    finally:
        logs.close()
