"""Reads the collective logs of the ranks, from files that both sides map: without asking them."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ddp_notebook.model import Collectives, Ranks, collective_log

READ_LAST = 2000
"""Records of each rank that a diagnosis looks at."""


class CollectiveLogs:
    """The collective logs of a session's ranks, in its `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lent: dict[int, Path] = {}
        # Keyed by file, not by rank: another thread may open a log while a script replaces the
        # rank.
        self._maps: dict[Path, memoryview] = {}
        self._known: dict[Path, collective_log.LogTail] = {}
        self.clock_offsets_ns: Mapping[int, int] = {}
        """Of ranks on other hosts, what is added to their monotonic times to have ours."""

    def lend(self, ranks: Ranks, folder: Path) -> None:
        """Read the logs of a script's processes in place of those of `ranks`."""
        self._lent = dict.fromkeys(ranks, folder)

    def take_back(self, ranks: Ranks) -> None:
        """Read the logs of the ranks' own processes again."""
        lent, self._lent = [self._file(rank) for rank in ranks], {}
        for file in lent:  # another thread that is reading one keeps its own reference
            if file.parent != self._folder:
                self._maps.pop(file, None)
                self._known.pop(file, None)

    def _file(self, rank: int) -> Path:
        return self._lent.get(rank, self._folder) / f"ring-{rank}"

    def written(self, ranks: Ranks) -> tuple[tuple[int, int], ...]:
        """Per rank, its run and how many collectives it issued there. Takes microseconds."""
        maps = [self._mapped(self._file(rank)) for rank in ranks]
        headers = (collective_log.HEADER.unpack_from(w) for w in maps if w is not None)
        return tuple((run, written) for _, run, written, _ in headers)

    def read(self, ranks: Ranks, run: int | None = None, last: int = READ_LAST) -> Collectives:
        """Return the collectives that `ranks` issued; only those of `run` if it is given.

        The ranks of a run may count themselves from 0: members of groups are the `ranks` in
        their order.
        """
        return self._read(ranks, run, dict.fromkeys(ranks, last))

    def read_since(
        self, ranks: Ranks, run: int, first: Mapping[int, int], most: int
    ) -> Collectives:
        """Return the newest `most` collectives of `ranks` in `run`, from each rank's `first` on.

        Cheap enough to call many times a second: it reads only new records.
        """
        lasts = {}
        for rank in ranks:
            words = self._mapped(self._file(rank))
            if words is not None:
                _, run_there, written, _ = collective_log.HEADER.unpack_from(words)
                if run_there == run and written > first.get(rank, 0):
                    lasts[rank] = min(written - first.get(rank, 0), most)
        return self._read(ranks, run, lasts)

    def _read(self, ranks: Ranks, run: int | None, lasts: Mapping[int, int]) -> Collectives:
        logs = {}
        for rank, last in lasts.items():
            file = self._file(rank)
            words = self._mapped(file)
            if words is not None:
                log = collective_log.read(words, rank, last, self._known.get(file))
                self._known[file] = replace(log, records=())
                if run is None or log.run == run:
                    logs[rank] = _shifted(log, self.clock_offsets_ns.get(rank, 0))
        return collective_log.joined(logs, ranks)

    def close(self) -> None:
        """Unmap the files."""
        maps, self._maps = self._maps, {}
        for words in maps.values():
            words.release()

    def _mapped(self, file: Path) -> memoryview | None:
        words = self._maps.get(file)
        if words is None:
            with contextlib.suppress(OSError, ValueError):
                descriptor = os.open(file, os.O_RDONLY)
                try:
                    if os.fstat(descriptor).st_size == collective_log.FILE_BYTES:
                        mapped = mmap.mmap(
                            descriptor, collective_log.FILE_BYTES, access=mmap.ACCESS_READ
                        )
                        words = self._maps[file] = memoryview(mapped)
                finally:
                    os.close(descriptor)
        return words


def _shifted(log: collective_log.LogTail, offset_ns: int) -> collective_log.LogTail:
    """Return a log with its times moved by `offset_ns`; 0 is not over yet, and stays."""
    if not offset_ns:
        return log
    records = (
        replace(
            record,
            issued_ns=record.issued_ns + offset_ns,
            done_ns=record.done_ns and record.done_ns + offset_ns,
        )
        for record in log.records
    )
    return replace(log, records=tuple(records))
