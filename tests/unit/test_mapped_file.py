"""Files that ranks map: no promise of room that the disk does not keep, and nobody else's file."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_notebook.rank.collectives import mapped_file
from ddp_notebook.rank.collectives.guard import Guard, Mismatch
from ddp_notebook.rank.collectives.operations import OPERATIONS, Facts
from ddp_notebook.rank.collectives.splits import ComparedExchanges

SIZE_BYTES = 1 << 16


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """Within, a file has no room for more: as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_the_room_is_there_when_the_file_is_made(tmp_path: Path) -> None:
    made = mapped_file.make(tmp_path / "log", SIZE_BYTES)
    status = (tmp_path / "log").stat()
    assert status.st_blocks * 512 >= SIZE_BYTES == len(made)
    assert status.st_mode & 0o777 == 0o600


def test_without_room_there_is_an_error_in_place_of_a_killed_process(tmp_path: Path) -> None:
    with largest_file(SIZE_BYTES // 2), pytest.raises(OSError):  # any will do
        mapped_file.make(tmp_path / "log", SIZE_BYTES)
    assert not (tmp_path / "log").exists()


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link_to_zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def short(path: Path) -> None:
    path.write_bytes(b"0" * (SIZE_BYTES - 1))


def nothing(path: Path) -> None:
    """No such file."""


@pytest.mark.parametrize("make", [fifo, link_to_zero, folder, short, nothing])
def test_what_is_not_another_ranks_file_is_not_mapped(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "log")
    with pytest.raises((OSError, ValueError)):
        mapped_file.open_other(tmp_path, "log", SIZE_BYTES)


@pytest.mark.parametrize("name", ["/dev/zero", "../log", "a/b", "a\0b", 3, None, ["log"], {}])
def test_a_path_or_no_name_at_all_is_refused(tmp_path: Path, name: object) -> None:
    mapped_file.make(tmp_path.parent / "log", SIZE_BYTES)
    with pytest.raises(ValueError, match="not the name of a file"):
        mapped_file.open_other(tmp_path, name, SIZE_BYTES)


class Store:
    """As much of torch's store as the guard uses."""

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self.keys[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        return self.keys[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.keys for key in keys)


def guard(folder: Path, rank: int) -> Guard:
    process: Any = SimpleNamespace(rank=rank, folder=folder, collective_log=folder / f"ring-{rank}")
    return Guard(process, rank)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[]",
        b"null",
        b'{"guard": "/dev/zero", "log": "/dev/zero", "rank": 1}',
        b'{"guard": "own", "log": "ring-1"}',
        b'{"guard": "own", "log": "ring-1", "rank": "x"}',
        b'{"guard": "own", "log": "ring-1", "rank": 1e400}',
        json.dumps({"guard": "../guard", "log": "ring-1", "rank": 1}).encode(),
    ],
)
def test_what_another_user_wrote_into_the_store_is_no_peer(tmp_path: Path, value: bytes) -> None:
    """torch's store asks nobody who they are: setup goes on without that peer."""
    store = Store()
    mine = guard(tmp_path, 0)
    mine.publish(store, "world", 0)
    (key,) = store.keys
    store.set(key.replace("/0", "/1"), value)
    mine.find_peers(store, "world", 0, 2)
    assert not mine._peers


def exchanges(folder: Path, store: Store, rank: int, of: Guard) -> ComparedExchanges:
    """All_to_alls of three ranks."""
    return ComparedExchanges(folder, of.name, store, "world", rank, (0, 1, 2), "world")


EVENLY = [torch.empty(3), torch.empty(3), [1, 1, 1]]


@pytest.mark.parametrize(
    "value",
    [None, b"[]", b"null", b"{}", b'{"guard": 7}', b'{"guard": "guard-/../../x"}', b"\xff"],
    ids=str,
)
def test_a_peer_without_a_guard_is_passed_over_in_an_all_to_all_and_the_others_compared(
    tmp_path: Path, value: bytes | None
) -> None:
    """It had no room for one, or another user wrote something else into the store.

    Three elements are sent, and three received.
    """
    store = Store()
    guards = {rank: guard(tmp_path, rank) for rank in (0, 1)}
    for rank, of in guards.items():
        of.publish(store, "world", rank)
    if value is not None:
        store.set(next(iter(store.keys)).removesuffix("0") + "2", value)
    mine, theirs = (exchanges(tmp_path, store, rank, of) for rank, of in guards.items())
    for seq_id in range(2):
        mine.check(seq_id, [*EVENLY, [1, 1, 1]], lists=False)
        theirs.check(seq_id, [*EVENLY, [1, 1, 1]], lists=False)
    mine.check(2, [*EVENLY, [2, 1, 0]], lists=False)
    with pytest.raises(Mismatch, match="rank 0 sends 1 to rank 1, which expects 3"):
        theirs.check(2, [*EVENLY[:2], [3, 0, 0], [1, 1, 1]], lists=False)


def test_the_name_of_its_own_file_is_not_asked_of_the_store(tmp_path: Path) -> None:
    store = Store()
    of = guard(tmp_path, 0)
    of.publish(store, "world", 0)
    for key in store.keys:
        store.set(key, b'{"guard": "guard-another"}')
    mine = exchanges(tmp_path, store, 0, of)
    mine.check(0, [*EVENLY, [1, 1, 1]], lists=False)
    assert (tmp_path / of.name.replace("guard", "splits")).exists()
    assert not (tmp_path / "splits-another").exists()


def test_a_peer_is_found_by_the_name_of_its_file_alone(tmp_path: Path) -> None:
    store = Store()
    mine, theirs = guard(tmp_path, 0), guard(tmp_path, 1)
    theirs.publish(store, "world", 1)
    assert str(tmp_path) not in str(store.keys)
    mine.find_peers(store, "world", 0, 2)
    assert len(mine._peers) == 1


def test_a_peer_that_comes_after_the_group_is_made_is_compared_all_the_same(tmp_path: Path) -> None:
    """NCCL's groups are made without waiting for the others."""
    store = Store()
    mine, theirs = guard(tmp_path, 0), guard(tmp_path, 1)
    mine.find_peers(store, "world", 0, 2)
    operation, facts = OPERATIONS[0], Facts(shape=(4,), dtype="float32")
    mine.check(0, 0, 7, operation, facts)
    theirs.publish(store, "world", 1)
    theirs.find_peers(store, "world", 1, 2)
    theirs.check(1, 0, 8, operation, facts)
    with pytest.raises(Mismatch, match=r"rank 0 called .*, rank 1 called"):
        mine.check(1, 1, 7, operation, facts)


def test_a_store_that_has_gone_leaves_the_group_without_peers_and_whole(tmp_path: Path) -> None:
    """A rank that hosts it may raise, and end, while another makes its group."""

    class Gone(Store):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection was likely closed. Did the remote server shutdown?")

    mine = guard(tmp_path, 0)
    mine.publish(Gone(), "world", 0)
    mine.find_peers(Gone(), "world", 0, 2)
    assert not mine._peers
