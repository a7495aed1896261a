"""The twin of a session's folder: what is copied from it, and what is not believed."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ddp_notebook.launch.twin import Mirror, write_part
from ddp_notebook.model import Phase, collective_log
from ddp_notebook.rank.collectives.log_writer import LogWriter

REST = bytes(collective_log.REST.size)


class Copied:
    """A folder of ranks and its copy."""

    def __init__(self, folder: Path) -> None:
        self.there, self.here = folder / "there", folder / "here"
        for each in (self.there, self.here):
            for name in ("output", "log", "script-3"):
                (each / name).mkdir(parents=True)
        self.sent: list[tuple[str, int, bytes]] = []
        self.mirror = Mirror(self.there, self._send)

    def _send(self, kind: str, name: str, begin: int, blob: bytes) -> None:
        assert kind == "part"
        self.sent.append((name, begin, blob))
        write_part(self.here, name, begin, blob)

    def same(self, name: str) -> bool:
        return (self.there / name).read_bytes() == (self.here / name).read_bytes()


@pytest.fixture
def copied(tmp_path: Path) -> Copied:
    return Copied(tmp_path)


def test_a_collective_log_is_copied_as_it_grows(copied: Copied) -> None:
    log = LogWriter(copied.there / "output" / "ring-0")
    copied.mirror.look_for_files()
    copied.mirror.look()
    chance = random.Random(3)
    last = 0
    for step in range(60):
        for _ in range(chance.choice((0, 1, 7, 700))):
            log.text(f"a text {step}", "x" * chance.randrange(3000))
            last = log.write(step, 5, REST)
            if chance.random() < 0.8:
                log.done(last, 9)
        if chance.random() < 0.5:
            log.mark(last - chance.randrange(200), Phase.DONE, 11)
        copied.mirror.look()
        assert copied.same("output/ring-0"), step
        if step % 20 == 19:
            log.begin(step)
    assert last  # it wrote


def test_a_look_at_an_idle_log_sends_nothing_and_at_a_busy_one_little(copied: Copied) -> None:
    log = LogWriter(copied.there / "output" / "ring-5")
    for _ in range(5000):
        log.done(log.write(1, 5, REST), 9)
    copied.mirror.look_for_files()
    copied.mirror.look()
    copied.sent.clear()
    copied.mirror.look()
    assert not copied.sent
    log.done(log.write(1, 5, REST), 9)
    copied.mirror.look()
    assert sum(len(blob) for _, _, blob in copied.sent) <= 4096


def test_the_header_is_sent_last(copied: Copied) -> None:
    log = LogWriter(copied.there / "output" / "ring-0")
    copied.mirror.look_for_files()
    for _ in range(1000):
        log.write(1, 5, REST)
    copied.mirror.look()
    assert copied.sent[-1][1] == 0
    assert len({begin for _, begin, _ in copied.sent}) > 3


def test_an_old_record_that_is_done_late_is_found_when_all_is_compared(copied: Copied) -> None:
    log = LogWriter(copied.there / "output" / "ring-0")
    copied.mirror.look_for_files()
    for _ in range(9000):
        log.write(1, 5, REST)
    copied.mirror.look()
    log.done(1000, 9)
    copied.mirror.look()
    assert not copied.same("output/ring-0")
    copied.mirror.look(all_of_it=True)
    assert copied.same("output/ring-0")


def test_texts_are_copied_as_they_grow_and_their_ends_where_they_grow_fast(copied: Copied) -> None:
    names = ("log/rank-2.log", "store.log", "script-3/rank-2.err")
    for name in names:
        (copied.there / name).write_text("first")
    copied.mirror.look_for_files()
    for name in names:
        with (copied.there / name).open("a") as stream:
            stream.write(" second")
    copied.mirror.look_for_files()
    assert all(copied.same(name) for name in names)
    with (copied.there / names[0]).open("a") as stream:
        stream.write("x" * (1 << 20) + "end")
    copied.sent.clear()
    copied.mirror.look_for_files()
    there, here = ((each / names[0]).read_bytes() for each in (copied.there, copied.here))
    assert len(here) == len(there)
    assert here[-100_000:] == there[-100_000:]
    assert sum(len(blob) for _, _, blob in copied.sent) < 1 << 19
    copied.mirror.look_for_files()
    assert copied.sent[-1][1] + len(copied.sent[-1][2]) == len(there)


def test_what_is_no_file_of_a_session_is_not_sent(copied: Copied) -> None:
    for name in ("output/rank-0-cell-1.txt", "log/secret", "lock", "output/guard-3-0"):
        (copied.there / name).write_text("x" * collective_log.FILE_BYTES)
    (copied.there / "log" / "rank-0.log").symlink_to("/etc/hostname")
    copied.mirror.look_for_files()
    copied.mirror.look()
    assert [name for name, _, _ in copied.sent if name != "log/rank-0.log"] == []


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        ("../x", 0),
        ("output/../../x", 0),
        ("/etc/x", 0),
        ("output/ring-0/../x", 0),
        ("security/ipcontroller-ddp-client.json", 0),
        ("ask-0", 0),
        ("output/ring-0\n", 0),
        ("output/ring-0", -1),
        ("output/ring-0", collective_log.FILE_BYTES),
        ("log/rank-0.log", 1 << 62),
        ("log/rank-0.log", "7"),
        (7, 0),
        (None, 0),
    ],
)
def test_a_part_of_another_file_is_refused(copied: Copied, name: Any, begin: Any) -> None:
    before = {path: path.stat().st_size for path in copied.here.rglob("*") if path.is_file()}
    with pytest.raises((ValueError, TypeError)):
        write_part(copied.here, name, begin, b"x")
    after = {path: path.stat().st_size for path in copied.here.rglob("*") if path.is_file()}
    assert after == before


def test_no_link_is_followed(copied: Copied, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (copied.here / "log" / "rank-0.log").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"):
        partial(write_part, copied.here)("log/rank-0.log", 0, b"x")
    assert victim.read_text() == "mine"
