"""Lets one process of this user's act on a prepared rank, after it has said so (`--take-over`).

Until then, and for all others, a prepared rank can only be asked. Who has taken it over is known by
what the kernel says of the other end of the socket; when that process ends, the rank goes on as
before. From then on `breakpoint()` stops the rank, and breakpoints can be set.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ddp_notebook.launch.child import load
from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import Question
from ddp_notebook.rank.component import Run
from ddp_notebook.rank.control import Handlers
from ddp_notebook.rank.inspect.answers import Answers
from ddp_notebook.rank.prepared import job_folder
from ddp_notebook.rank.setup.rescue import Rescue
from ddp_notebook.rank.watched import Watched

if TYPE_CHECKING:
    from ddp_notebook.rank.debugger.at_lines import AtLines
    from ddp_notebook.rank.debugger.debugger import Debugger

T = TypeVar("T")


class TakenOver:
    """Who may act on this rank, and what it then can have done. On the thread that answers.

    `run` is the number of its run.
    """

    def __init__(
        self, watched: Watched, answers: Answers, run: int, asker: Callable[[], int]
    ) -> None:
        self._asker = asker
        self._run = run
        self._gate = gate = watched.gate
        self._limits = watched.observer.limits
        parts = watched.init_calls, watched.sockets, watched.resolver
        self._rescue = Rescue(watched.main_thread, *parts)
        self._by = (0, 0)
        """A process, and when it began; zeros for none."""
        self._interrupted = False
        self._watched, self._answers = watched, answers
        self._at_lines: AtLines | None = None
        """None until it was taken over for the first time: few jobs are, and it is loaded then."""
        self._hooks = Hooks()
        self._pauses = self._armed = False
        """Ranks are paused before collectives, or may be at lines."""
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
        for question in calls.AT_LINES:
            on(question, partial(self._answer, question))
        return handlers

    def _take(self) -> calls.Taken:
        pid = self._asker()
        if not job_folder.began(pid):
            raise PermissionError("the system does not tell which process asks")
        if self._is_there() and self._by[0] != pid:
            raise PermissionError(f"process {self._by[0]} has taken it over")
        if not self._by[0]:
            self._begin()
        self._by = pid, job_folder.began(pid)
        return calls.Taken(pid)

    def _begin(self) -> None:
        lines = self._at_lines
        if lines is None:
            lines = self._at_lines = _loaded(self._watched, self._answers)
            lines.debugger.is_wanted = self._is_there
            lines.debugger.armed.tell = self._arm
            lines.debugger.attach()
        lines.debugger.enabled = True
        lines.debugger.run_begins(Run(self._run))
        self._hooks.put(lines.debugger)

    def _answer(self, question: Question[Any, Any], request: Any) -> Any:
        return self._allowed(lambda: self._lines().answer(question, request))

    def _lines(self) -> AtLines:
        assert self._at_lines is not None, "it was taken over"
        return self._at_lines

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
        self._gate.resume()
        self._forget()
        return calls.Taken(0)

    def _forget(self) -> None:
        """Do again as it did before it was taken over. Any thread."""
        self._by = (0, 0)
        self._hooks.remove()
        self._gate.paused = self._pauses = False
        if self._at_lines is not None:
            self._at_lines.debugger.leave()
        self._lift()

    def _arm(self, armed: bool) -> None:
        self._armed = armed
        self._lift()

    def _lift(self) -> None:
        # Peers of a rank that is paused wait in what they issue: their time limit is not for that.
        self._limits.lift(self._pauses or self._armed)

    def _pause(self) -> calls.PausedAt:
        self._pauses = True
        self._lift()
        self._gate.pause()
        return calls.PausedAt(self._gate.at)

    def _resume(self) -> int | None:
        at = self._gate.resume()
        self._pauses = False
        self._lift()
        return at

    def _end(self) -> calls.Freed:
        """Interrupt the main thread as Ctrl-C does, once, and end what torch waits for."""
        self._gate.paused = False  # one that is paused now issues nothing more
        self._lines().debugger.enabled = False
        handled = signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, signal.SIG_DFL, None)
        if handled and not self._interrupted:
            self._interrupted = True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return self._rescue.free()


def _loaded(watched: Watched, answers: Answers) -> AtLines:
    made: AtLines = load("ddp_notebook.rank.debugger.at_lines").AtLines(
        watched, watched.process.events, answers.variables
    )
    return made


class Hooks:
    """Has `breakpoint()`, and an error that ends the program, stop a rank that was taken over."""

    def __init__(self) -> None:
        self._debugger: Debugger | None = None
        self._pid = os.getpid()
        self._before: tuple[Any, Any] = (sys.breakpointhook, sys.excepthook)

    def put(self, debugger: Debugger) -> None:
        """Replace Python's: they tell `debugger`."""
        self._debugger = debugger
        self._before = sys.breakpointhook, sys.excepthook
        sys.breakpointhook, sys.excepthook = self._on_breakpoint, self._on_error

    def remove(self) -> None:
        """Give them back, where nothing else has replaced them since."""
        self._debugger = None
        if sys.breakpointhook == self._on_breakpoint:
            sys.breakpointhook = self._before[0]
        if sys.excepthook == self._on_error:
            sys.excepthook = self._before[1]

    def _on_breakpoint(self, *arguments: Any, **named: Any) -> Any:
        debugger = self._debugger
        if os.environ.get("PYTHONBREAKPOINT") == "0":
            return None
        if debugger is None or os.getpid() != self._pid:
            return self._before[0](*arguments, **named)
        debugger.on_breakpoint(sys._getframe(1), "breakpoint()")
        return None

    def _on_error(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if self._debugger is not None and os.getpid() == self._pid:
            self._debugger.raised(error.with_traceback(trace))
        self._before[1](kind, error, trace)
