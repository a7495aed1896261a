"""Writes this rank's collectives into its collective log; `model.collective_log` is the format.

Everything here runs before each collective: it must cost a microsecond and raise nothing.
"""

from __future__ import annotations

import itertools
import json
import struct
import threading
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from ddp_notebook.model import Phase, collective_log
from ddp_notebook.rank.collectives import mapped_file

_PHASE = {phase: number for number, phase in enumerate(collective_log.PHASES)}
_DONE = _PHASE[Phase.DONE]
_RECORD = struct.Struct(f"{collective_log.HEAD.format}{collective_log.REST.size}s")
_WRITTEN = collective_log.WRITTEN_AT // 8
# Names of this module are looked up faster than attributes of another.
_FROM, _CAPACITY, _BYTES = (
    collective_log.RECORDS_FROM,
    collective_log.CAPACITY,
    collective_log.RECORD_BYTES,
)
_DONE_NS, _PHASE_AT = collective_log.DONE_OFFSET, collective_log.PHASE_OFFSET
_HELD = struct.Struct("<Q")


class LogWriter:
    """One file, of one run at a time, mapped by this rank and the session.

    Raises OSError when there is no room for it.
    """

    def __init__(self, path: Path) -> None:
        self._map = mapped_file.make(path, collective_log.FILE_BYTES)
        self._words = memoryview(self._map).cast("Q")
        self._pack = _RECORD.pack_into
        self._adding = threading.RLock()
        self.begin(0)

    def begin(self, run: int) -> None:
        """Forget the records of the last run."""
        self._counter = itertools.count()
        self._texts: dict[Hashable, int] = {}
        self._text_bytes = 0
        self.prepared: dict[Hashable, Any] = {}
        """The common part of records, packed. It names texts by number, so it ends with them."""
        # The old records stay where they are and count no more. A reader that was at them sees
        # afterwards, by the run's number, that they are of another run.
        collective_log.HEADER.pack_into(self._map, 0, collective_log.MAGIC, run, 0, 0)

    @property
    def written(self) -> int:
        """How many records the run has, including overwritten ones."""
        return int(self._words[_WRITTEN])

    def waited(self) -> collective_log.Waited:
        """The collectives of this run in which the rank waited. Any thread."""
        return collective_log.waited(memoryview(self._map))

    def text(self, key: Hashable, value: Any) -> int:
        """The number of a text, by which records name it; 0 when there is no room."""
        number = self._texts.get(key)
        if number is not None:
            return number
        line = json.dumps(value).encode() + b"\n"
        # Seldom, once for each text: two threads that issue new kinds at once would take one place
        # and one number. Reentrant, as a handler of a signal may issue a collective in between.
        with self._adding:
            if key in self._texts:  # the other thread's was the same
                return self._texts[key]
            begin, end = self._text_bytes, self._text_bytes + len(line)
            # Operations and groups are named by two bytes.
            if end > collective_log.TEXT_BYTES or len(self._texts) >= 0xFFFE:
                return 0
            # The text before its size, as with records: a reader decodes what the size covers.
            texts_from = collective_log.TEXTS_FROM
            self._map[texts_from + begin : texts_from + end] = line
            self._text_bytes = self._words[collective_log.TEXT_AT // 8] = end
            number = self._texts[key] = len(self._texts) + 1
            return number

    def keep_prepared(self, key: Hashable, prepared: Any) -> None:
        """Keep what records of this run have in common."""
        if len(self.prepared) > 2000:
            self.prepared.clear()
        self.prepared[key] = prepared

    def write(self, seq_id: int, issued_ns: int, rest: bytes, backwards: int = 0) -> int:
        """Write a record, its `rest` packed as `collective_log.REST`; its number."""
        # One step under the interpreter's lock: threads that issue at once, the user's and
        # autograd's, get places of their own. The slower of two may then set the count back by one,
        # and a reader sees the newest record only when another one follows.
        number = next(self._counter)
        at = _FROM + number % _CAPACITY * _BYTES
        # First the record, then the count: who reads the file meanwhile takes what is below that,
        # and sees by the number whether it was overwritten.
        self._pack(self._map, at, number + 1, seq_id, issued_ns, 0, backwards, rest)
        self._words[_WRITTEN] = number + 1
        return number

    def done(self, number: int, done_ns: int) -> None:
        """Mark it as done: as `mark`, and quicker, since nearly every collective gets there."""
        at = _FROM + number % _CAPACITY * _BYTES
        words = self._words
        if words[at >> 3] == number + 1:
            # The time before the phase, so that a reader who finds it done finds when. No fence
            # orders the two stores: x86 keeps their order by itself; elsewhere a reader may for a
            # moment see it done at time 0.
            words[(at + _DONE_NS) >> 3] = done_ns
            self._map[at + _PHASE_AT] = _DONE

    def came_from(self, number: int, peer: int) -> None:
        """Record that a recv from any rank got its message from `peer`."""
        at = _FROM + number % _CAPACITY * _BYTES
        if self._words[at >> 3] == number + 1:
            collective_log.PEER.pack_into(self._map, at + collective_log.PEER_OFFSET, peer)

    def mark(self, number: int, phase: Phase, done_ns: int) -> None:
        """Set the phase of a record; one that was overwritten since is left alone."""
        at = _FROM + number % _CAPACITY * _BYTES
        if self._words[at // 8] == number + 1:
            self._words[(at + _DONE_NS) // 8] = done_ns
            self._map[at + _PHASE_AT] = _PHASE[phase]

    def issued(self, number: int, now_ns: int) -> None:
        """A paused record is issued now; no communication has taken place until now."""
        at = _FROM + number % _CAPACITY * _BYTES
        if self._words[at // 8] == number + 1:
            issued_at = (at + collective_log.ISSUED_OFFSET) // 8
            held_ns = max(0, now_ns - self._words[issued_at])
            _HELD.pack_into(self._map, at + collective_log.HELD_OFFSET, held_ns)
            self._words[issued_at] = now_ns
            self._map[at + _PHASE_AT] = _PHASE[Phase.ISSUED]

    def freed(self, number: int, now_ns: int) -> None:
        """A record has failed because its rank was freed or interrupted."""
        at = _FROM + number % _CAPACITY * _BYTES
        if self._words[at // 8] == number + 1:
            # Before the phase: a reader that sees a failure must know that it is none of torch's.
            self._map[at + collective_log.FREED_OFFSET] = 1
        self.mark(number, Phase.FAILED, now_ns)
