"""Writes how a prepared rank ended, and its state after a long wait, for later.

A process that is killed from outside has no time to write. So a rank that has waited for a while
writes the report it would give; and when a launcher ends it by SIGTERM, or it crashes,
faulthandler, which does not need Python to run, writes its stacks before the signal takes effect.
"""

from __future__ import annotations

import atexit
import contextlib
import dis
import faulthandler
import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import process, util
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from ddp_notebook.rank.prepared import job_folder

FIRST = 1000
"""Of multiprocessing's finalizers, this one is called first."""


def note_the_end(folder: Path) -> None:
    """When Python ends this process, write that, with the error that ended it."""
    pid, shows = os.getpid(), sys.excepthook
    error: dict[str, object] = {}

    def take_error(value: BaseException) -> None:
        with contextlib.suppress(Exception):  # the user's own __str__
            frames = traceback.extract_tb(value.__traceback__)
            error.update(_as_error(type(value).__name__, str(value), frames))

    def take(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == pid:
            take_error(value)
        ends()  # a launcher that sees another rank fail may end this one before Python does
        shows(kind, value, trace)

    def ends() -> None:
        if os.getpid() == pid:
            with contextlib.suppress(OSError):
                # torch ends a process of multiprocessing whose parent is gone, by SIGINT.
                parent = process.parent_process()
                orphan = parent is not None and os.getppid() != parent.pid
                end = {"error": error or exits.error or None, "orphan": orphan}
                job_folder.write(folder / "end.json", end)

    def python_ends() -> None:
        if not error and (value := exits.raised()) is not None:
            take_error(value)  # shown by a hook that replaced ours
        ends()
        exits.forget()

    def child_ends() -> None:
        if (failed := _in_flight()) is not None:
            take_error(failed)
        ends()

    # Python ends in four ways, and no hook sees all of them: by an uncaught exception
    # (sys.excepthook); by sys.exit after one that was caught (no hook: the function itself is
    # wrapped); in a child of multiprocessing, which catches everything and calls os._exit; and at
    # the end of the script. For what a signal ends, faulthandler writes (below).
    exits = _Exits()
    exits.watch()
    sys.excepthook = take
    atexit.register(python_ends)
    if process.parent_process() is not None:
        # multiprocessing catches what its child raises, and ends one that it forked by os._exit().
        util.Finalize(None, child_ends, exitpriority=FIRST)


def _in_flight() -> BaseException | None:
    """Return the error that ends a child of multiprocessing, from within a finalizer, or None."""
    failed = sys.exception()
    if not isinstance(failed, SystemExit):
        return failed
    return (failed.__context__ or failed) if failed.code not in (None, 0) else None


class _Exits:
    """The main thread's calls of `sys.exit`, for which Python calls no hook."""

    def __init__(self) -> None:
        self._noted: dict[str, object] = {}
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
        self._outermost: FrameType | None = frame

    def watch(self) -> None:
        """Note each call from now on."""
        pythons = sys.exit

        @functools.wraps(pythons)
        def leave(status: Any = None, /) -> NoReturn:
            if threading.current_thread() is threading.main_thread():
                kind, value, trace = sys.exc_info()
                self._noted = {}
                with contextlib.suppress(Exception):  # the user's own __str__
                    if kind is not None and issubclass(kind, Exception) and status not in (None, 0):
                        frames = traceback.extract_tb(trace)
                        self._noted = _as_error(kind.__name__, str(value), frames)
                    elif status not in (None, 0):
                        frames = traceback.extract_stack(sys._getframe(1))
                        self._noted = _as_error("SystemExit", str(status), frames)
            pythons(status)

        sys.exit = leave

    @property
    def error(self) -> dict[str, object]:
        """That of the last call, if its exit code is not 0 and what it raised was not caught."""
        frame = self._outermost
        if frame is None:
            return {}
        last = dis.opname[frame.f_code.co_code[frame.f_lasti]]  # how the script was left
        return {} if last.startswith("RETURN") else self._noted

    def raised(self) -> BaseException | None:
        """Return the error that ended the script, as Python kept it; None if it ended otherwise."""
        value = getattr(sys, "last_value", None)
        trace = value.__traceback__ if isinstance(value, BaseException) else None
        # It is also set by what shows an error that ends nothing, such as a prompt.
        return value if trace is not None and trace.tb_frame is self._outermost else None

    def forget(self) -> None:
        """Hold nothing of the user's: Python is about to free it."""
        self._outermost = None


def _as_error(kind: str, text: str, frames: Sequence[traceback.FrameSummary]) -> dict[str, object]:
    rows = [(f.filename, f.lineno or 0, f.name, f.line or "") for f in frames[-100:]]
    return {"type": kind, "text": text[:2000], "frames": rows}


def write_stacks_when_ended(folder: Path) -> None:
    """On SIGTERM or a crash, write the stacks of all threads before it ends this process.

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
        if not faulthandler.is_enabled():  # else the user reads of crashes elsewhere
            faulthandler.enable(file)
            _hide_from_the_user()

        def write_none() -> None:
            # The end of a forked child is not that of this process.
            if not _is_handled():
                faulthandler.unregister(signal.SIGTERM)
            with contextlib.suppress(OSError):  # faulthandler may be on for a file of the user's
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, file, inheritable=False)
                os.close(nowhere)

        os.register_at_fork(after_in_child=write_none)


def _hide_from_the_user() -> None:
    """Have faulthandler seem as it would be without us: not enabled.

    A program that enables it only where it is not enabled would else not do so, and a crash of it
    would be in our file and not on its stderr.
    """
    module: Any = faulthandler
    is_enabled, enable, disable = module.is_enabled, module.enable, module.disable
    ours = True

    @functools.wraps(is_enabled)
    def users_is_enabled() -> bool:
        return not ours and is_enabled()

    @functools.wraps(enable)
    def users_enable(*args: Any, **options: Any) -> None:
        nonlocal ours
        enable(*args, **options)
        ours = False

    @functools.wraps(disable)
    def users_disable() -> bool:
        nonlocal ours
        was_enabled, ours = users_is_enabled(), False
        disable()
        return was_enabled

    module.is_enabled, module.enable = users_is_enabled, users_enable
    module.disable = users_disable


def _is_handled() -> bool:
    return signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL


STACKS = "stacks.txt"


def write_when_stuck(
    counts: Callable[[], object], report: Callable[[], object], path: Path
) -> None:
    """In a thread of its own: while `counts` stays the same, write `report` now and then."""
    pid = os.getpid()

    def watch() -> None:
        last, waited_s, due_s = counts(), 0.0, 2.0
        pause = threading.Event()
        while not pause.wait(1.0) and os.getpid() == pid:
            now = counts()
            if now != last:
                last, waited_s, due_s = now, 0.0, 2.0
                continue
            waited_s += 1.0
            if waited_s >= due_s:
                due_s = waited_s + min(60.0, 2 * due_s)
                with contextlib.suppress(Exception):  # what is not written cannot be read later
                    job_folder.write(path, {"counts": now, "report": report()})

    threading.Thread(target=watch, name="ddp-record", daemon=True).start()
