"""How a prepared rank ended, and what it did when it had long waited: written, for later.

What ends a process from outside leaves no time to write. So a rank that has waited for a while
writes what it would answer: that is there, too, when a launcher has ended all.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from ddp_notebook.rank.prepared import job_folder

_MOST_TEXT = 2000
_FIRST_S, _LONGEST_S = 2.0, 60.0


def note_the_end(folder: Path) -> None:
    """When Python ends this process, write so; with the error that ended it."""
    pid, shows = os.getpid(), sys.excepthook
    error: dict[str, object] = {}

    def take(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == pid:
            with contextlib.suppress(Exception):  # the user's own __str__
                frames = traceback.extract_tb(trace)[-100:]
                error.update(type=kind.__name__, text=str(value)[:_MOST_TEXT])
                error["frames"] = [
                    (f.filename, f.lineno or 0, f.name, f.line or "") for f in frames
                ]
        shows(kind, value, trace)

    def ends() -> None:
        if os.getpid() == pid:
            with contextlib.suppress(OSError):
                job_folder.write(folder / "end.json", {"error": error or None})

    sys.excepthook = take
    atexit.register(ends)


def write_when_stuck(
    counts: Callable[[], object], report: Callable[[], object], path: Path
) -> None:
    """From a thread of ours: while `counts` stays the same, write `report` now and then."""
    pid = os.getpid()

    def watch() -> None:
        last, waited_s, due_s = counts(), 0.0, _FIRST_S
        pause = threading.Event()
        while not pause.wait(1.0) and os.getpid() == pid:
            now = counts()
            if now != last:
                last, waited_s, due_s = now, 0.0, _FIRST_S
                continue
            waited_s += 1.0
            if waited_s >= due_s:
                due_s = waited_s + min(_LONGEST_S, 2 * due_s)
                with contextlib.suppress(Exception):  # what is not written cannot be read later
                    job_folder.write(path, {"counts": now, "report": report()})

    threading.Thread(target=watch, name="ddp-record", daemon=True).start()
