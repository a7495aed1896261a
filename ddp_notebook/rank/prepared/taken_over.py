"""Lets one process of this user's act on a prepared rank, after it has said so (`--take-over`).

Until then, and for all others, a prepared rank can only be asked. Who has taken it over is known by
what the kernel says of the other end of the socket; when that process ends, the rank goes on as
before.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import TypeVar

from ddp_notebook.rank import calls
from ddp_notebook.rank.control import Handlers
from ddp_notebook.rank.prepared import job_folder
from ddp_notebook.rank.setup.rescue import Rescue
from ddp_notebook.rank.watched import Watched

T = TypeVar("T")


class TakenOver:
    """Who may act on this rank, and what it then can have done. On the thread that answers."""

    def __init__(self, watched: Watched, asker: Callable[[], int]) -> None:
        self._asker = asker
        self._gate = gate = watched.gate
        self._limits = watched.observer.limits
        parts = watched.init_calls, watched.sockets, watched.resolver
        self._rescue = Rescue(watched.main_thread, *parts)
        self._by = (0, 0)
        """A process, and when it began; zeros for none."""
        self._interrupted = False
        gate.is_wanted = self._is_there

    def to(self, handlers: Handlers) -> Handlers:
        """`handlers`, through which it is done."""
        on, gate = handlers.on_question, self._gate
        on(calls.TAKE_OVER, lambda _: self._take())
        on(calls.GIVE_BACK, lambda _: self._allowed(self._give_back))
        on(calls.PAUSE, lambda _: self._allowed(self._pause))
        on(calls.STEP, lambda _: calls.PausedAt(self._allowed(gate.step)))
        on(calls.RESUME, lambda _: calls.PausedAt(self._allowed(self._resume)))
        on(calls.FREE, lambda _: self._allowed(self._end))
        return handlers

    def _take(self) -> calls.Taken:
        pid = self._asker()
        if not job_folder.began(pid):
            raise PermissionError("the system does not tell which process asks")
        if self._is_there() and self._by[0] != pid:
            raise PermissionError(f"process {self._by[0]} has taken it over")
        self._by = pid, job_folder.began(pid)
        return calls.Taken(pid)

    def _allowed(self, act: Callable[[], T]) -> T:
        """What `act` returns. Raises PermissionError if who asks has not taken the rank over."""
        if not self._is_there() or self._by[0] != self._asker():
            raise PermissionError("who asks has not taken it over: %ddp_attach PID --take-over")
        return act()

    def _is_there(self) -> bool:
        """True while the process that has taken it over is there."""
        pid, began = self._by
        if pid and job_folder.began(pid) != began:
            self._forget()
        return bool(self._by[0])

    def _give_back(self) -> calls.Taken:
        self._resume()
        self._forget()
        return calls.Taken(0)

    def _forget(self) -> None:
        self._by = (0, 0)
        self._gate.paused = False
        self._limits.lift(False)

    def _pause(self) -> calls.PausedAt:
        # Peers of a rank that is paused wait in what they issue: their time limit is not for that.
        self._limits.lift(True)
        self._gate.pause()
        return calls.PausedAt(self._gate.at)

    def _resume(self) -> int | None:
        at = self._gate.resume()
        self._limits.lift(False)
        return at

    def _end(self) -> calls.Freed:
        """Interrupt the main thread as Ctrl-C does, once, and end what torch waits for."""
        self._gate.paused = False  # one that is paused now issues nothing more
        handled = signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, signal.SIG_DFL, None)
        if handled and not self._interrupted:
            self._interrupted = True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return self._rescue.free()
