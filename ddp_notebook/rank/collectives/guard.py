"""Compares the ranks' arguments of a collective before it is issued.

gloo aborts the process when a message is larger than its buffer, and adds up what does not
belong together without an error. So each rank writes a word for every collective_seq_id of a
group where the others can read it: a file per rank, mapped by all ranks of the host. The first
rank to write a collective_seq_id sees no peer; of two concurrent writers at least one sees the
other, because each writes its own word before it reads.
"""

from __future__ import annotations

import contextlib
import json
import weakref
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ddp_notebook.launch.process_ids import own_process_id
from ddp_notebook.model import at_place, collective_log
from ddp_notebook.rank.collectives import mapped_file
from ddp_notebook.rank.collectives.operations import Facts, Operation
from ddp_notebook.rank.rank_process import RankProcess

# How far apart two ranks may be and still be compared. What was overwritten by then has another
# number, and is passed over: a mismatch is missed, none is invented.
ENTRIES = 1024
_MASK = ENTRIES - 1
_WORDS_PER_ENTRY = 2
_FILE_BYTES = ENTRIES * _WORDS_PER_ENTRY * 8
_MOST_HASHES = 10_000


class Mismatch(RuntimeError):
    """This rank's arguments of a collective do not match another rank's."""


class _Peer:
    """Another rank's words, and where its collectives are logged.

    Raises OSError, ValueError, KeyError and TypeError when `address` names no such files.
    """

    __slots__ = ("_folder", "_log", "rank", "words")

    def __init__(self, folder: Path, address: Mapping[str, Any]) -> None:
        if not isinstance(rank := address["rank"], int):
            raise TypeError(f"not the number of a rank: {rank!r:.100}")
        self.rank = rank
        self.words = memoryview(mapped_file.open_other(folder, address["guard"], _FILE_BYTES)).cast(
            "Q"
        )
        self._folder, self._log = folder, address["log"]

    def recorded(self, number: int) -> str:
        """Describe its collective `number`, in words, as its collective log has it."""
        with contextlib.suppress(OSError, ValueError):
            log = mapped_file.open_other(self._folder, self._log, collective_log.FILE_BYTES)
            for record in collective_log.read(log.read(), self.rank).records:
                if record.number == number:
                    about = (record.dtype, record.shape, record.reduce_op, record.root)
                    at = at_place(record.place)
                    return describe(record.operation, *about) + at
        return "something else"


class Guard:
    """One rank's words for one group, and its view of the others'. `number` names its file.

    Raises OSError when there is no room for it.
    """

    def __init__(self, process: RankProcess, number: int) -> None:
        # Others look for it by this name. On another host a process may have the same pid, and its
        # words are not ours: hence the number that holds among hosts.
        path = process.folder / f"guard-{own_process_id()}-{number}"
        self._rank = process.rank
        self._folder = process.folder
        self._words = memoryview(mapped_file.make(path, _FILE_BYTES)).cast("Q")
        # The words beside the peer: read before each collective, as a local name.
        self._peers: tuple[tuple[memoryview, _Peer], ...] = ()
        self._late: dict[int, tuple[Any, str]] = {}
        """The ranks that were not there yet: the store that they write into, and their key."""
        log = process.collective_log.name
        self.name = path.name
        """Of its file, in the session's folder."""
        self._address = {"guard": path.name, "log": log, "rank": process.rank}
        self._remove = weakref.finalize(self, path.unlink, missing_ok=True)

    def publish(self, store: Any, prefix: str, rank: int) -> None:
        """Write into the group's store where the others find this rank's words.

        Before the group is made: so they are there for all who are in it afterwards.
        """
        store.set(_key(prefix, rank), json.dumps(self._address))

    def find_peers(self, store: Any, prefix: str, rank: int, size: int) -> None:
        """Find the words of the others, now that the group is made.

        With NCCL it is made before all have arrived: `check` looks again for those who are late.
        """
        peers = {*range(size)}
        if size > 8:  # a rank looks at its neighbours and the first: a difference is between some
            peers = {0, (rank - 1) % size, (rank + 1) % size}
        self._late = {peer: (store, _key(prefix, peer)) for peer in sorted(peers - {rank})}
        self._find_late()

    def _find_late(self) -> None:
        peers = []
        for number, (store, key) in list(self._late.items()):
            # It is on another host; or another user wrote into the store, which is not protected.
            # Or the store has gone, with a rank that has ended by now.
            unusable = (OSError, ValueError, KeyError, TypeError, RuntimeError)
            try:
                if not store.check([key]):
                    continue
                peers.append(_Peer(self._folder, json.loads(store.get(key))))
            except unusable:
                pass
            del self._late[number]
        self._peers += tuple((peer.words, peer) for peer in peers)

    def check(
        self, seq_id: int, number: int, fingerprint: int, operation: Operation, facts: Facts
    ) -> None:
        """Write this rank's word for `seq_id`. All ranks must have the same `fingerprint`.

        Raises Mismatch when another rank has another. Before each collective: one write and
        one read a peer, no call.
        """
        # Number and fingerprint are one word, so that a peer never pairs one collective's number
        # with the fingerprint of another. No fence stands between the store of it and the loads
        # below, and a CPU may load while its own store is still on the way; what the interpreter
        # does in between, some hundred instructions, gives it the time. Where both ranks miss each
        # other all the same, the mismatch goes to torch, as it would without a guard.
        word = ((seq_id + 1) & 0xFFFFFF) << 40 | fingerprint
        at = (seq_id & _MASK) * _WORDS_PER_ENTRY
        words = self._words
        # The number comes before the word: who sees the word reads the number to say what this was.
        words[at + 1] = number
        words[at] = word
        if self._late and not seq_id & (seq_id - 1):  # a power of two: to ask the store takes long
            self._find_late()
        for theirs, peer in self._peers:
            other = theirs[at]
            if other != word and other >> 40 == word >> 40:
                about = (facts.dtype, facts.shape, facts.reduce_op, facts.root)
                ours, brought = describe(operation.name, *about), peer.recorded(theirs[at + 1])
                raise Mismatch(
                    f"Collective {seq_id} does not match: rank {self._rank} called {ours}, rank "
                    f"{peer.rank} called {brought}. It was blocked before sending; plain PyTorch "
                    "would crash, hang or return wrong numbers. See which rank is at fault: "
                    "%ddp_why"
                )


@lru_cache(maxsize=_MOST_HASHES)
def hash_of(value: tuple[Any, ...]) -> int:
    """40 bits that are the same in every process (Python's own hash of texts is not)."""
    data = repr(value).encode()
    return (zlib.crc32(data) << 8 | zlib.adler32(data) & 0xFF) & ((1 << 40) - 1)


def _key(prefix: str, rank: int) -> str:
    return f"ddp_notebook/guard/{prefix}/{rank}"


def name_of(store: Any, prefix: str, rank: int) -> str:
    """The `Guard.name` of another rank of the group, as it stands in the store.

    Raises RuntimeError, ValueError, KeyError and TypeError where nothing usable does.
    """
    key = _key(prefix, rank)
    name = json.loads(store.get(key))["guard"] if store.check([key]) else None
    if not isinstance(name, str) or "/" in name:
        raise ValueError(f"not the name of a file: {name!r:.100}")
    return name


def describe(
    operation: str, dtype: str, shape: Sequence[int], reduce_op: str, root: int | None
) -> str:
    """``all_reduce(MAX) of float32 [4, 8]``."""
    kind = f"({reduce_op})" if reduce_op not in ("", "SUM") else ""
    of = f" of {dtype} {list(shape)}" if dtype else ""
    where = f" from rank {root}" if root is not None and operation == "broadcast" else ""
    return f"{operation}{kind}{of}{where}"
