"""What the user's code on a rank prints and displays, on its way to the notebook.

`RankStream` stands in for sys.stdout and sys.stderr. A write costs an append; the
beacon's thread joins what was written meanwhile and sends it, so a print arrives within
milliseconds without a flush. Per cell, `LIMIT_BYTES` go to the notebook; everything
beyond is kept in a file, and its last part is sent when the cell ends.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from ddp_notebook.model import Output, OutputKind
from ddp_notebook.rank.events import Beacon

LIMIT_BYTES = 1_000_000
"""Output of one cell on one rank that is sent to the notebook."""
TAIL_BYTES = 16_000
"""Of that, how much is kept back for the end of a longer output."""
SPOOL_LIMIT_BYTES = 1 << 30
FLOOD_WRITES = 2000
"""With so many writes between two sendings, writes are collected in C."""
FLOOD_POLL_S = 0.02
_CALM_POLLS = 10


class _Sink:
    """The buffer under a flood's TextIOWrapper. Its `write` is deque.append itself: C code that
    keeps the interpreter lock, so that pieces of two threads cannot change places."""

    closed = False

    def __init__(self, pieces: deque[bytes]) -> None:
        self.write = pieces.append
        self.flush = [].clear

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False


class RankStream(io.TextIOBase):
    """sys.stdout or sys.stderr of a rank. Outside of cells it writes to `idle`."""

    def __init__(self, relay: Relay, what: OutputKind, idle: TextIO, fd: int) -> None:
        self._relay = relay
        self._what = what
        self._idle = idle
        self._fd = fd
        self._append = relay.written.append
        self._pieces: deque[bytes] = deque()
        self._wrapper = io.TextIOWrapper(
            _Sink(self._pieces),  # type: ignore[type-var]
            encoding="utf-8",
            errors="replace",
            newline="",
        )
        self._calm_polls = 0
        relay.streams.append(self)

    def __getattr__(self, name: str) -> Any:
        # ipykernel tells its own stream which request it serves.
        return getattr(self._idle, name)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "replace"

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        relay = self._relay
        if not relay.cell:
            return self._write_elsewhere(text)
        if relay.flooded:
            relay.settle()  # what the other stream wrote before comes before
        self._append((self._what, text))
        if not relay.nudged:
            relay.nudged = True
            relay.nudge()
        return len(text)

    def _write_elsewhere(self, text: str) -> int:
        if self._relay.forked:  # a worker of the user's: its output reaches us through the log
            os.write(self._fd, text.encode("utf-8", "replace"))
            return len(text)
        return self._idle.write(text)

    def begin_flood(self) -> None:
        """From now on `write` is C code; `settle` has to be called to see what it wrote."""
        self._calm_polls = 0
        self.write = self._wrapper.write  # type: ignore[method-assign, assignment]

    def end_flood(self) -> None:
        """`write` is our own again."""
        self.__dict__.pop("write", None)

    def settle(self) -> None:
        """Move what a flood wrote to where everything else is."""
        self._wrapper.flush()
        pieces = self._pieces
        while pieces:
            self._append((self._what, pieces.popleft()))

    def calm_down(self) -> bool:
        """End the flood when it was quiet for some time; True while it goes on."""
        self._calm_polls = 0 if self._pieces else self._calm_polls + 1
        if self._calm_polls > _CALM_POLLS:
            self.end_flood()
        return "write" in self.__dict__

    def flush(self) -> None:
        if not self._relay.cell and not self._relay.forked:
            self._idle.flush()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._fd


class Relay:
    """Collects one cell's output and hands it to the beacon as `Output` events."""

    def __init__(self, beacon: Beacon, log: Path, spool: Path) -> None:
        self.cell = 0
        self.forked = False
        self.nudged = False
        self.flooded = False
        self.written: deque[tuple[OutputKind, str | bytes]] = deque()
        self.streams: list[RankStream] = []
        self.withheld_bytes = 0
        self._beacon = beacon
        self._log = log
        self._log_offset = 0
        self._spool_folder = spool
        self._spool: io.BufferedWriter | None = None
        self._sent_bytes = 0
        self._kept: list[bytes] = []
        self._tail = bytearray()
        self._lock = threading.RLock()

    def nudge(self) -> None:
        """Have the sending thread look."""
        self._beacon.nudge()

    def begin(self, cell: int) -> None:
        """From now on, output belongs to `cell`."""
        with self._lock:
            self._sent_bytes = self.withheld_bytes = 0
            self._tail.clear()
            self._kept.clear()
            self._log_offset = self._log_size()
            self.cell = cell

    def end(self) -> int:
        """The cell is over: send the rest; the bytes that were not sent."""
        with self._lock:
            for stream in self.streams:
                stream.end_flood()
            self.collect()
            self.flooded = False
            if self.withheld_bytes:
                self.withheld_bytes -= len(self._tail)
                notice = f"\n[... {self.withheld_bytes:,} bytes not shown ...]\n"
                self._emit(OutputKind.STDOUT, notice.encode() + bytes(self._tail))
            if self._spool is not None:
                self._spool.close()
                self._spool = None
            self.cell = 0
            return self.withheld_bytes

    def collect(self) -> float | None:
        """Turn what was written since the last call into events (any thread).

        Seconds after which it should be called again without a nudge, or None.
        """
        if not self.cell:
            return None
        with self._lock:
            self.nudged = False
            if len(self.written) > FLOOD_WRITES and not self.flooded:
                self.flooded = True
                for stream in self.streams:
                    stream.begin_flood()
            if self.flooded:
                self._collect_flood()
            self._collect_written()
            self._collect_log()
            return FLOOD_POLL_S if self.flooded else None

    def settle(self) -> None:
        """Have everything written so far in `written`, in order."""
        with self._lock:
            for stream in self.streams:
                stream.settle()

    def show(self, **fields: Any) -> None:
        """A rich display, a result or a traceback, after everything written before it."""
        with self._lock:
            self.collect()
            size = sum(
                len(v) if isinstance(v, str) else 64 for v in fields.get("data", {}).values()
            )
            size += len(fields.get("text", ""))
            if size > LIMIT_BYTES * 10 or self._sent_bytes > LIMIT_BYTES:
                self.withheld_bytes += size
                return
            self._sent_bytes += size
            self._beacon.emit(Output, cell=self.cell, **fields)

    def _collect_flood(self) -> None:
        for stream in self.streams:
            stream._wrapper.flush()
        going_on = [stream.calm_down() for stream in self.streams]
        self.flooded = any(going_on)
        self.settle()

    def _collect_written(self) -> None:
        written, pieces = self.written, list[bytes]()
        what = OutputKind.STDOUT
        while written:
            kind, piece = written.popleft()
            if kind is not what and pieces:
                self._send(what, b"".join(pieces))
                pieces = []
            what = kind
            pieces.append(piece if isinstance(piece, bytes) else piece.encode("utf-8", "replace"))
        if pieces:
            self._send(what, b"".join(pieces))

    def _collect_log(self) -> None:
        """What C code, subprocesses and forked workers wrote to the process's own streams."""
        size = self._log_size()
        if size > self._log_offset:
            with contextlib.suppress(OSError), self._log.open("rb") as log:
                log.seek(self._log_offset)
                data = log.read(size - self._log_offset)
                self._log_offset += len(data)
                self._send(OutputKind.STDOUT, data)

    def _log_size(self) -> int:
        try:
            return self._log.stat().st_size
        except OSError:
            return 0

    def _send(self, what: OutputKind, data: bytes) -> None:
        room = max(0, LIMIT_BYTES - TAIL_BYTES - self._sent_bytes)
        if self.withheld_bytes == 0 and len(data) <= room:
            self._kept.append(data)
            self._emit(what, data)
            return
        if self.withheld_bytes == 0:
            self._open_spool()
            head = data[:room].decode("utf-8", "ignore").encode()  # no half character
            self._emit(what, head)
            self._write_spool(head)
            data = data[len(head) :]
        self.withheld_bytes += len(data)
        self._write_spool(data)
        self._tail += data[-TAIL_BYTES:]
        del self._tail[:-TAIL_BYTES]

    def _emit(self, what: OutputKind, data: bytes) -> None:
        self._sent_bytes += len(data)
        if data:
            text = data.decode("utf-8", "replace")
            self._beacon.emit(Output, cell=self.cell, what=what, text=text)

    def _open_spool(self) -> None:
        path = self._spool_folder / f"rank-{self._beacon.rank}-cell-{self.cell}.txt"
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            self._spool = os.fdopen(descriptor, "wb")
            self._spool.writelines(self._kept)
        self._kept.clear()

    def _write_spool(self, data: bytes) -> None:
        if self._spool is None:
            return
        try:
            if self._spool.tell() < SPOOL_LIMIT_BYTES:
                self._spool.write(data)
        except OSError:  # the disk is full: the notebook still has the head and the tail
            self._spool = None


def as_text(data: Mapping[str, Any]) -> dict[str, Any]:
    """A MIME bundle without bytes: images as base64."""
    return {
        kind: base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else value
        for kind, value in data.items()
    }
