"""The file in which a rank writes down its collectives."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_notebook.model import Collective, Phase, ring

SIZES = st.lists(st.integers(0, 2**31), max_size=10)


def empty_file() -> mmap.mmap:
    return mmap.mmap(-1, ring.FILE_BYTES)


def begin(file: mmap.mmap, run: int = 1) -> None:
    ring.HEADER.pack_into(file, 0, ring.MAGIC, run, 0, 0)


def put_text(file: mmap.mmap, line: bytes) -> None:
    used = ring.HEADER.unpack_from(file)[3]
    file[ring.TEXTS_FROM + used : ring.TEXTS_FROM + used + len(line)] = line
    header = list(ring.HEADER.unpack_from(file))
    header[3] = used + len(line)
    ring.HEADER.pack_into(file, 0, *header)


def put_record(file: mmap.mmap, number: int, shape: list[int], phase: Phase) -> None:
    at = ring.RECORDS_FROM + number % ring.CAPACITY * ring.RECORD_BYTES
    sizes = (*shape, *(0,) * ring.DIMENSIONS)[: ring.DIMENSIONS]
    ring.HEAD.pack_into(file, at, number + 1, number, 100 + number, 0, 4)
    rest = (6, 24, 2, 1, 0, 4, 1, 3, 0, 0, ring.PHASES.index(phase))
    ring.REST.pack_into(
        file, at + ring.HEAD.size, *rest, min(len(shape), 8), 0, 1, ring.NOBODY, 3, -5, *sizes
    )
    header = list(ring.HEADER.unpack_from(file))
    header[2] = number + 1
    ring.HEADER.pack_into(file, 0, *header)


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
    found = ring.read(memoryview(file), 2)
    (record,) = found.records
    assert (record.rank, record.number, record.operation) == (2, 0, "send")
    assert (record.shape, record.phase) == (tuple(shape[: ring.DIMENSIONS]), phase)
    assert (record.root, record.peer, record.tag) == (None, 3, -5)
    assert str(record.place) == "train.py:41 in step"
    assert found.groups == {"default": (0, 1, 2, 3)}


@pytest.mark.parametrize("count", [1, 5, ring.CAPACITY, ring.CAPACITY + 1, 3 * ring.CAPACITY])
def test_the_newest_records_are_kept(count: int) -> None:
    file = with_texts()
    for number in range(max(0, count - ring.CAPACITY - 10), count):
        put_record(file, number, [2], Phase.DONE)
    found = ring.read(memoryview(file), 0)
    numbers = [record.number for record in found.records]
    assert numbers == list(range(found.first, count))
    assert len(numbers) >= min(count, ring.CAPACITY) - 1
    assert [r.number for r in ring.read(memoryview(file), 0, last=1).records] == [count - 1]


@pytest.mark.parametrize("data", [b"", b"x" * 100, bytes(ring.FILE_BYTES)])
def test_what_is_no_ring_reads_as_an_empty_one(data: bytes) -> None:
    assert ring.read(data, 0) == ring.RankRing()


@given(st.binary(min_size=ring.REST.size, max_size=ring.REST.size))
def test_a_record_that_something_else_wrote_over_is_read_too(rest: bytes) -> None:
    file = with_texts()
    put_record(file, 0, [2, 3], Phase.DONE)
    at = ring.RECORDS_FROM + ring.HEAD.size
    file[at : at + ring.REST.size] = rest
    (record,) = ring.read(file, 1).records
    assert (record.rank, record.number, record.slot) == (1, 0, 0)
    assert all(isinstance(each, str) for each in (record.operation, record.group, record.dtype))


def test_a_text_that_is_not_there_is_empty() -> None:
    file = empty_file()
    begin(file)
    put_record(file, 0, [2], Phase.ISSUED)
    (record,) = ring.read(memoryview(file), 0).records
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
    from ddp_notebook.agent.ring import RingWriter  # only what runs in a rank may write

    writer = RingWriter(tmp_path / "ring")
    stop = threading.Event()
    group = writer.text("g", {"group": "default", "members": [0]})

    def write() -> None:
        number = 0
        while not stop.is_set():
            sizes = (number % 97, *(0,) * 7)
            rest = ring.REST.pack(
                number % 97, 0, 0, 0, 0, group, 0, 0, 0, 0, 1, 1, 0, 1, -1, -1, 0, *sizes
            )
            number = writer.write(number, number, rest) + 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        seen = 0
        while seen < 50:
            found = ring.read((tmp_path / "ring").read_bytes(), 0, last=200)
            for record in found.records:
                assert record.slot == record.number == record.issued_ns
                assert record.shape == (record.number % 97,) and record.numel == record.shape[0]
            seen += bool(found.records)
    finally:
        stop.set()
        thread.join()


def test_a_mark_on_a_record_that_is_gone_changes_nothing(tmp_path: Path) -> None:
    from ddp_notebook.agent.ring import RingWriter

    writer = RingWriter(tmp_path / "ring")
    rest = ring.REST.pack(*(0,) * 11, 0, 0, 1, -1, -1, 0, *(0,) * 8)
    for number in range(ring.CAPACITY + 3):
        writer.write(number, number, rest)
    writer.mark(1, Phase.FAILED, 5)
    writer.mark(ring.CAPACITY + 2, Phase.DONE, 9)
    records = ring.read((tmp_path / "ring").read_bytes(), 0).records
    assert {record.phase for record in records[:-1]} == {ring.PHASES[0]}
    assert (records[-1].phase, records[-1].done_ns) == (Phase.DONE, 9)
