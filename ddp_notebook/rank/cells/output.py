"""Forwards what the user's code on a rank prints and displays to the notebook.

`RankStream` stands in for sys.stdout and sys.stderr. A write costs an append; the event
sender's thread joins what was written meanwhile and sends it, so a print arrives within
milliseconds without a flush. Where there are thousands of writes they take a fast path in C.
Per cell, `LIMIT_BYTES` go to the notebook; everything beyond is kept in the output file, and
its last part is sent when the cell ends.
"""

from __future__ import annotations

import base64
import codecs
import contextlib
import io
import itertools
import operator
import os
import sys
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from ddp_notebook.model import Output, OutputKind
from ddp_notebook.rank.component import Component, Run
from ddp_notebook.rank.events import EventSender

LIMIT_BYTES = 1_000_000
"""Output of one cell on one rank that is sent to the notebook."""
TAIL_BYTES = 16_000
"""Of that, how much is kept back for the end of a longer output."""
FAST_PATH_WRITES = 2000
"""With so many writes between two sendings, writes take the fast path."""
FAST_PATH_POLL_S = 0.02
_SINCE = "[written by threads since the last cell:]\n"


class _Sink:
    """The buffer under the fast path's TextIOWrapper.

    Its `write` is deque.append itself: C code that keeps the interpreter lock, so that pieces of
    two threads cannot change places.
    """

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

    def __init__(self, forwarder: OutputForwarder, what: OutputKind, idle: TextIO, fd: int) -> None:
        self._forwarder = forwarder
        self._what = what
        self._idle = idle
        self._fd = fd
        self._append = forwarder.written.append
        self._pieces: deque[bytes] = deque()
        self._wrapper = io.TextIOWrapper(
            _Sink(self._pieces),  # type: ignore[type-var]
            encoding="utf-8",
            errors="replace",
            newline="",
        )
        self._calm_polls = 0
        forwarder.streams.append(self)

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
        forwarder = self._forwarder
        if not forwarder.cell:
            if forwarder.forked:  # a worker of the user's: its output reaches us through the log
                os.write(self._fd, text.encode("utf-8", "replace"))
                return len(text)
            forwarder.keep(self._what, text)
            return self._idle.write(text)
        if forwarder.fast:
            forwarder.settle()  # what the other stream wrote before comes before
        # First the text, then a look at `woken`; `collect` clears `woken` first and takes
        # afterwards. So who finds it set has appended before a `collect` that is still to come.
        self._append((self._what, text))
        if not forwarder.woken:
            forwarder.woken = True
            forwarder.wake()
        return len(text)

    def printed(self) -> int | None:
        """Grows with whatever this rank prints; None while there is too much of it."""
        return self._forwarder.printed()

    def begin_fast_path(self) -> None:
        """From now on `write` is C code; only `settle` shows what it wrote."""
        self._calm_polls = 0
        # An attribute of the object hides the method of its class: `print` looks `write` up at each
        # call, and finds C code. Who has kept the bound method calls ours all the same; it first
        # settles what came this way, so that the order is kept.
        self.write = self._wrapper.write  # type: ignore[method-assign, assignment]

    def end_fast_path(self) -> None:
        """`write` is our own again."""
        self.__dict__.pop("write", None)

    def settle(self) -> None:
        """Move what was written on the fast path to where everything else is."""
        self._wrapper.flush()
        pieces = self._pieces
        while pieces:
            self._append((self._what, pieces.popleft()))

    def calm_down(self) -> bool:
        """Leave the fast path when it was quiet for some time; True while it is used."""
        self._wrapper.flush()
        self._calm_polls = 0 if self._pieces else self._calm_polls + 1
        if self._calm_polls > 10:
            self.end_fast_path()
        return "write" in self.__dict__

    def flush(self) -> None:
        if not self._forwarder.cell and not self._forwarder.forked:
            self._idle.flush()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._fd


class OutputForwarder(Component):
    """Collects one run's output and hands it to the event sender as `Output` events.

    `logs` are the files behind the process's own streams, and as what they are shown. Nothing tells
    when something was written there: `look_every_s` says how often to look, None for each pulse.
    """

    def __init__(
        self,
        events: EventSender,
        logs: Mapping[Path, OutputKind],
        folder: Path,
        look_every_s: float | None = None,
    ) -> None:
        self.cell = 0
        """The session's number of the run whose output it is; 0 between runs."""
        self.forked = False
        self.woken = False
        self.fast = False
        self.written: deque[tuple[OutputKind, str | bytes]] = deque()
        self.streams: list[RankStream] = []
        self.withheld_bytes = 0
        self._events = events
        self._logs = dict(logs)
        self._log_offsets = dict.fromkeys(logs, 0)
        self._look_every_s = look_every_s
        self._folder = folder
        self._file: io.BufferedWriter | None = None
        self._sent_bytes = 0
        self._tracebacks = 0
        self._sent: list[bytes] = []
        self._tail = bytearray()
        # Reentrant: `show` collects, and a signal handler of the user's may print on the thread
        # that holds it.
        self._lock = threading.RLock()
        self._own_threads: frozenset[int | None] = frozenset()
        """The threads that existed before the user's first run."""
        # The most that is kept of the output between runs: the newest writes, and how much of each.
        self._between: deque[tuple[OutputKind, str | bytes]] = deque(maxlen=400)

    def attach(self) -> None:
        """A forked child is a worker of the user's and has no forwarder."""

        def leave_alone() -> None:
            self.cell = 0
            self.forked = True

        os.register_at_fork(after_in_child=leave_alone)

    def wake(self) -> None:
        """Have the sending thread look."""
        self._events.wake()

    def run_begins(self, run: Run) -> None:
        """From now on, output belongs to this run."""
        for name, stream in zip(("stdout", "stderr"), self.streams, strict=False):
            if getattr(sys, name) is None:  # an earlier cell's doing; IPython writes to them
                setattr(sys, name, stream)
        with self._lock:
            self._sent_bytes = self.withheld_bytes = self._tracebacks = 0
            self._tail.clear()
            self._sent.clear()
            self._log_offsets = {log: _size(log) for log in self._logs}
            self._own_threads = self._own_threads or frozenset(
                thread.ident for thread in threading.enumerate()
            )
            if self._between:  # as a notebook's kernel shows it: with the next cell
                self.written.append((OutputKind.STDOUT, _SINCE))
                for _ in range(len(self._between)):  # a thread may be writing
                    self.written.append(self._between.popleft())
            self.cell = run.number

    def keep(self, what: OutputKind, text: str) -> None:
        """Keep what a thread of the user's writes between runs for the run that comes next."""
        if self._own_threads and threading.get_ident() not in self._own_threads:
            self._between.append((what, text[:4000]))

    def run_ends(self) -> None:
        """The run is over: send the rest."""
        with self._lock:
            for stream in self.streams:
                stream.end_fast_path()
            self.collect()
            self.fast = False
            if self.withheld_bytes:
                self.withheld_bytes -= len(self._tail)
                notice = f"\n[... {self.withheld_bytes:,} bytes not shown ...]\n"
                self._emit(OutputKind.STDOUT, notice.encode() + bytes(self._tail))
            if self._file is not None:
                self._file.close()
                self._file = None
            self.cell = 0

    def collect(self) -> float | None:
        """Turn what was written since the last call into events (any thread).

        Seconds after which it should be called again without a wake-up, or None.
        """
        if not self.cell:
            return None
        with self._lock:
            self.woken = False
            if len(self.written) > FAST_PATH_WRITES and not self.fast:
                self.fast = True
                for stream in self.streams:
                    stream.begin_fast_path()
            if self.fast:
                still_fast = [stream.calm_down() for stream in self.streams]
                self.fast = any(still_fast)
                self.settle()
            self._collect_written()
            # What C code, subprocesses and forked workers wrote to the process's own streams.
            for path, what in self._logs.items():
                offset, size = self._log_offsets[path], _size(path)
                if size > offset:
                    with contextlib.suppress(OSError), path.open("rb") as log:
                        log.seek(offset)
                        data = whole_characters(log.read(size - offset))
                        self._log_offsets[path] += len(data)
                        self._send(what, data)
            return FAST_PATH_POLL_S if self.fast else self._look_every_s

    def printed(self) -> int | None:
        """See `RankStream.printed`."""
        with self._lock:
            if self.fast:
                return None
            return self._sent_bytes + self.withheld_bytes + len(self.written)

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
            too_much = size > LIMIT_BYTES * 10 or self._sent_bytes > LIMIT_BYTES
            if too_much:
                # The first tracebacks of a run are sent, however much was written before.
                is_error = fields.get("what") is OutputKind.ERROR
                self._tracebacks += is_error
                if not is_error or self._tracebacks > 20:
                    self.withheld_bytes += size
                    return
            self._sent_bytes += size
            self._events.emit(Output, cell=self.cell, **fields)

    def _collect_written(self) -> None:
        written = [self.written.popleft() for _ in range(len(self.written))]
        for what, pieces in itertools.groupby(written, operator.itemgetter(0)):
            data = (p if isinstance(p, bytes) else p.encode("utf-8", "replace") for _, p in pieces)
            self._send(what, b"".join(data))

    def _send(self, what: OutputKind, data: bytes) -> None:
        room = max(0, LIMIT_BYTES - TAIL_BYTES - self._sent_bytes)
        if self.withheld_bytes == 0 and len(data) <= room:
            self._sent.append(data)
            self._emit(what, data)
            return
        if self.withheld_bytes == 0:
            path = self._folder / f"rank-{self._events.rank}-cell-{self.cell}.txt"
            with contextlib.suppress(OSError):
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                self._file = os.fdopen(descriptor, "wb")
                self._file.writelines(self._sent)
            self._sent.clear()
            head = data[:room].decode("utf-8", "ignore").encode()  # no half character
            self._emit(what, head)
            self._write_file(head)
            data = data[len(head) :]
        self.withheld_bytes += len(data)
        self._write_file(data)
        self._tail += data[-TAIL_BYTES:]
        del self._tail[:-TAIL_BYTES]

    def _emit(self, what: OutputKind, data: bytes) -> None:
        self._sent_bytes += len(data)
        if data:
            text = data.decode("utf-8", "replace")
            self._events.emit(Output, cell=self.cell, what=what, text=text)

    def _write_file(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            if self._file.tell() < (1 << 30):
                self._file.write(data)
        except OSError:  # the disk is full: the notebook still has the head and the tail
            self._file = None


def whole_characters(data: bytes) -> bytes:
    """`data` without a character of UTF-8 at its end that is not complete."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    pending, _ = decoder.getstate()
    return data.removesuffix(pending)


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0


def as_text(data: Mapping[str, Any]) -> dict[str, Any]:
    """A MIME bundle without bytes: images as base64."""
    return {
        kind: base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else value
        for kind, value in data.items()
    }
