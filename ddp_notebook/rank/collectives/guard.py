"""Compares what ranks bring to a collective before it is issued.

gloo aborts the process when a message is larger than its buffer, and adds up what does not
belong together without a word. So each rank writes a word for every slot of a group where the
others can read it: a file per rank, mapped by all ranks of the host. The first that comes to a
slot sees nobody; of two that come at once at least one sees the other.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_notebook.model import collective_log
from ddp_notebook.rank import boot, state
from ddp_notebook.rank.collectives.operations import Facts, Operation

SLOTS = 1024
_MASK = SLOTS - 1
_WORDS_PER_SLOT = 2
_FILE_BYTES = SLOTS * _WORDS_PER_SLOT * 8
_ALL_UP_TO = 8
"""In a larger group a rank looks at its neighbours and the first: a difference is between some."""
_FINGERPRINT = (1 << 40) - 1
_MOST_HASHES = 10_000

_hashes: dict[tuple[Any, ...], int] = {}
_files = itertools.count()


class Mismatch(RuntimeError):
    """What this rank brings to a collective does not match what another one brought."""


class Guard:
    """One rank's words for one group, and its view of the others'."""

    def __init__(self) -> None:
        path = boot.spool_folder() / f"guard-{os.getpid()}-{next(_files)}"
        self._mine = _mapped(path, make=True)
        self._peers: tuple[tuple[Path, int, memoryview], ...] = ()
        self._told = {"guard": str(path), "ring": str(ring_path()), "rank": state.current.rank}
        self._remove = weakref.finalize(self, path.unlink, missing_ok=True)

    def tell(self, store: Any, prefix: str, rank: int) -> None:
        """Write into the group's store where the others find this rank's words.

        Before the group is made: so they are there for all who are in it afterwards.
        """
        store.set(_key(prefix, rank), json.dumps(self._told))

    def meet(self, store: Any, prefix: str, rank: int, size: int) -> None:
        """Find the words of the others, now that the group is made."""
        found = []
        for peer in _looked_at(rank, size):
            # With NCCL the group is made before all have come; whoever is late is not guarded.
            if store.check([_key(prefix, peer)]):
                told = json.loads(store.get(_key(prefix, peer)))
                with contextlib.suppress(OSError):  # on another host
                    words = _mapped(Path(told["guard"]), make=False)
                    found.append((Path(told["ring"]), int(told["rank"]), words))
        self._peers = tuple(found)

    def check(self, slot: int, number: int, alike: int, operation: Operation, facts: Facts) -> None:
        """Write this rank's word for `slot`, the hash `alike` of what all must have the same.

        Raises Mismatch when another rank has another.
        """
        word = ((slot + 1) & 0xFFFFFF) << 40 | alike
        at = (slot & _MASK) * _WORDS_PER_SLOT
        mine = self._mine
        mine[at + 1] = number
        mine[at] = word
        for ring_file, rank, theirs in self._peers:
            other = theirs[at]
            if other != word and other >> 40 == word >> 40:
                told = _told_by(ring_file, rank, theirs[at + 1])
                raise Mismatch(_explain(slot, operation, facts, rank, told))


def hash_of(value: tuple[Any, ...]) -> int:
    """40 bits that are the same in every process (Python's own hash of texts is not)."""
    known = _hashes.get(value)
    if known is None:
        if len(_hashes) > _MOST_HASHES:
            _hashes.clear()
        data = repr(value).encode()
        known = (zlib.crc32(data) << 8 | zlib.adler32(data) & 0xFF) & _FINGERPRINT
        _hashes[value] = known
    return known


def ring_path() -> Path:
    """Where this rank's collectives are written down."""
    return boot.spool_folder() / f"ring-{state.current.rank}"


def _key(prefix: str, rank: int) -> str:
    return f"ddp_notebook/guard/{prefix}/{rank}"


def _looked_at(rank: int, size: int) -> list[int]:
    if size <= _ALL_UP_TO:
        return [peer for peer in range(size) if peer != rank]
    return sorted({0, (rank - 1) % size, (rank + 1) % size} - {rank})


def _mapped(path: Path, *, make: bool) -> memoryview:
    descriptor = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if make else 0), 0o600)
    try:
        if make:
            os.ftruncate(descriptor, _FILE_BYTES)
        return memoryview(mmap.mmap(descriptor, _FILE_BYTES)).cast("Q")
    finally:
        os.close(descriptor)


def _told_by(ring_file: Path, rank: int, number: int) -> str:
    """What another rank brought, in words."""
    with contextlib.suppress(OSError, ValueError):
        for record in collective_log.read(ring_file.read_bytes(), rank).records:
            if record.number == number:
                about = (record.dtype, record.shape, record.reduce_op, record.root)
                at = f" at {record.place}" if record.place else ""
                return describe(record.operation, *about) + at
    return "something else"


def _explain(slot: int, operation: Operation, facts: Facts, peer: int, theirs: str) -> str:
    mine = describe(operation.name, facts.dtype, facts.shape, facts.reduce_op, facts.root)
    return (
        f"rank {state.current.rank} brings {mine} to collective {slot} of the group, and rank "
        f"{peer} brings {theirs}. It was not sent: torch would abort the process, wait for ever "
        "or compute wrong numbers. Which rank is wrong: %ddp_why"
    )


def describe(
    operation: str, dtype: str, shape: Sequence[int], reduce_op: str, root: int | None
) -> str:
    """``all_reduce(MAX) of float32 [4, 8]``."""
    kind = f"({reduce_op})" if reduce_op not in ("", "SUM") else ""
    of = f" of {dtype} {list(shape)}" if dtype else ""
    where = f" from rank {root}" if root is not None and operation == "broadcast" else ""
    return f"{operation}{kind}{of}{where}"
