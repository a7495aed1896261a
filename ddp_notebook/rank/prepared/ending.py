"""Writes how a prepared rank ended, and its state after a long wait, for later.

A process that is killed from outside has no time to write. So a rank that has waited for a while
writes the report it would give; and when a launcher ends it by SIGTERM, faulthandler, which does
not need Python to run, writes its stacks before the signal takes effect.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
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
    """When Python ends this process, write that, with the error that ended it."""
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
        ends()  # a launcher that sees another rank fail may end this one before Python does
        shows(kind, value, trace)

    def ends() -> None:
        if os.getpid() == pid:
            with contextlib.suppress(OSError):
                job_folder.write(folder / "end.json", {"error": error or None})

    sys.excepthook = take
    atexit.register(ends)


def write_stacks_when_ended(folder: Path) -> None:
    """On SIGTERM, write the stacks of all threads before it ends this process.

    If the user handles that signal, now or later, nothing is written.
    """
    if not hasattr(faulthandler, "register") or _is_handled():
        return  # Windows, or the user's own
    main = threading.main_thread().ident or 0
    with contextlib.suppress(OSError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        file = os.open(folder / STACKS, flags, 0o600)
        os.write(file, f"main thread 0x{main:016x}\n".encode())
        faulthandler.register(signal.SIGTERM, file, all_threads=True, chain=True)
        os.register_at_fork(after_in_child=_write_none_in_a_fork)


def _write_none_in_a_fork() -> None:
    """In a forked child: its end is not that of this process."""
    if not _is_handled():
        faulthandler.unregister(signal.SIGTERM)


def _is_handled() -> bool:
    return signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL


STACKS = "stacks.txt"


def write_when_stuck(
    counts: Callable[[], object], report: Callable[[], object], path: Path
) -> None:
    """In a thread of its own: while `counts` stays the same, write `report` now and then."""
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
