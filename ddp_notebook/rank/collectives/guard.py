"""Compares what ranks bring to a collective before it is issued.

gloo aborts the process when a message is larger than its buffer, and adds up what does not
belong together without an error. So each rank writes a word for every collective_seq_id of a
group where the others can read it: a file per rank, mapped by all ranks of the host. The first
rank to write a collective_seq_id sees no peer; of two concurrent writers at least one sees the
other, because each writes its own word before it reads.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import weakref
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ddp_notebook.model import collective_log
from ddp_notebook.rank.boot import RankProcess
from ddp_notebook.rank.collectives.operations import Facts, Operation

ENTRIES = 1024
_MASK = ENTRIES - 1
_WORDS_PER_ENTRY = 2
_FILE_BYTES = ENTRIES * _WORDS_PER_ENTRY * 8
_ALL_UP_TO = 8
"""In a larger group a rank looks at its neighbours and the first: a difference is between some."""
_FINGERPRINT = (1 << 40) - 1
_MOST_HASHES = 10_000


class Mismatch(RuntimeError):
    """What this rank brings to a collective does not match what another one brought."""


class Guard:
    """One rank's words for one group, and its view of the others'. `number` names its file."""

    def __init__(self, process: RankProcess, number: int) -> None:
        path = process.folder / f"guard-{os.getpid()}-{number}"
        self._rank = process.rank
        self._words = _mapped(path, make=True)
        self._peers: tuple[tuple[Path, int, memoryview], ...] = ()
        log = str(process.collective_log)
        self._address = {"guard": str(path), "log": log, "rank": process.rank}
        self._remove = weakref.finalize(self, path.unlink, missing_ok=True)

    def publish(self, store: Any, prefix: str, rank: int) -> None:
        """Write into the group's store where the others find this rank's words.

        Before the group is made: so they are there for all who are in it afterwards.
        """
        store.set(_key(prefix, rank), json.dumps(self._address))

    def find_peers(self, store: Any, prefix: str, rank: int, size: int) -> None:
        """Find the words of the others, now that the group is made."""
        peers = []
        for peer in _compared(rank, size):
            # With NCCL the group is made before all have arrived; who is late is not guarded.
            if store.check([_key(prefix, peer)]):
                address = json.loads(store.get(_key(prefix, peer)))
                with contextlib.suppress(OSError):  # on another host
                    words = _mapped(Path(address["guard"]), make=False)
                    peers.append((Path(address["log"]), int(address["rank"]), words))
        self._peers = tuple(peers)

    def check(
        self, seq_id: int, number: int, alike: int, operation: Operation, facts: Facts
    ) -> None:
        """Write this rank's word for `seq_id`, the hash `alike` of what all must have the same.

        Raises Mismatch when another rank has another. Before each collective: one write and
        one read a peer, no call.
        """
        word = ((seq_id + 1) & 0xFFFFFF) << 40 | alike
        at = (seq_id & _MASK) * _WORDS_PER_ENTRY
        words = self._words
        words[at + 1] = number
        words[at] = word
        for log, rank, theirs in self._peers:
            other = theirs[at]
            if other != word and other >> 40 == word >> 40:
                theirs_text = _recorded(log, rank, theirs[at + 1])
                raise Mismatch(self._explain(seq_id, operation, facts, rank, theirs_text))

    def _explain(
        self, seq_id: int, operation: Operation, facts: Facts, peer: int, theirs: str
    ) -> str:
        ours = describe(operation.name, facts.dtype, facts.shape, facts.reduce_op, facts.root)
        return (
            f"rank {self._rank} brings {ours} to collective {seq_id} of the group, and rank "
            f"{peer} brings {theirs}. Which rank is wrong: %ddp_why. It was not sent: torch would "
            "abort the process, wait for ever or compute wrong numbers."
        )


@lru_cache(maxsize=_MOST_HASHES)
def hash_of(value: tuple[Any, ...]) -> int:
    """40 bits that are the same in every process (Python's own hash of texts is not)."""
    data = repr(value).encode()
    return (zlib.crc32(data) << 8 | zlib.adler32(data) & 0xFF) & _FINGERPRINT


def _key(prefix: str, rank: int) -> str:
    return f"ddp_notebook/guard/{prefix}/{rank}"


def _compared(rank: int, size: int) -> list[int]:
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


def _recorded(log: Path, rank: int, number: int) -> str:
    """What another rank brought, in words, as its collective log has it."""
    with contextlib.suppress(OSError, ValueError):
        for record in collective_log.read(log.read_bytes(), rank).records:
            if record.number == number:
                about = (record.dtype, record.shape, record.reduce_op, record.root)
                at = f" at {record.place}" if record.place else ""
                return describe(record.operation, *about) + at
    return "something else"


def describe(
    operation: str, dtype: str, shape: Sequence[int], reduce_op: str, root: int | None
) -> str:
    """``all_reduce(MAX) of float32 [4, 8]``."""
    kind = f"({reduce_op})" if reduce_op not in ("", "SUM") else ""
    of = f" of {dtype} {list(shape)}" if dtype else ""
    where = f" from rank {root}" if root is not None and operation == "broadcast" else ""
    return f"{operation}{kind}{of}{where}"
