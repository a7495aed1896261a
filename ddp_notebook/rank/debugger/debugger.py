"""The debugger of this rank: which thread is paused at which line, and how it is resumed."""

from __future__ import annotations

import ast
import contextlib
import itertools
import mmap
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from ddp_notebook.model import LineLeft, LineStopped
from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import How, Move
from ddp_notebook.rank.collectives.pause import PauseGate
from ddp_notebook.rank.component import Component, Run
from ddp_notebook.rank.debugger.armed import Armed
from ddp_notebook.rank.debugger.breakpoints import Breakpoints
from ddp_notebook.rank.debugger.lines import Backend, Goal, Lines, has_line, with_line
from ddp_notebook.rank.debugger.monitoring import Monitoring
from ddp_notebook.rank.debugger.source import lines_of, shown
from ddp_notebook.rank.debugger.tracing import Tracing
from ddp_notebook.rank.inspect import frames
from ddp_notebook.rank.inspect.frames import UserCode
from ddp_notebook.rank.main_thread import Aborted, MainThread

if TYPE_CHECKING:
    from ddp_notebook.rank.rank_process import Events

_POLL_S = 0.05
"""How often a thread that waits looks whether its run was aborted."""

T = TypeVar("T")
Places = Sequence[tuple[FrameType, int]]
"""Frames of the user's and the line that each is at, the innermost first."""


class Stop:
    """A thread that is paused before a line: it evaluates expressions until it is resumed.

    `number` counts a rank's stops. `over`: the frames that an error has left, when that is why it
    is paused: there is no next line.
    """

    def __init__(self, number: int, frame: FrameType, why: str, over: Places = ()) -> None:
        self.number = number
        self.frame = frame
        self.line = over[0][1] if over else frame.f_lineno
        self.why = why
        self.over = over
        self.thread = threading.current_thread()
        self.ordered = False
        """It was ordered to continue, and is about to."""
        self._inbox: queue.SimpleQueue[Move | Callable[[], None]] = queue.SimpleQueue()

    def resume(self, order: Move) -> None:
        """Resume the thread. From any other thread."""
        # Before the order is sent: it may have left the stop as soon as it is, and who asks then
        # where the rank stands must not be told of this stop again.
        self.ordered = True
        self._inbox.put(order)

    def ask(self, compute: Callable[[], T], timeout_s: float) -> T:
        """Return what `compute` gives in the thread that waits. From any other thread.

        Raises what it raises, TimeoutError.
        """
        answer: Future[T] = Future()

        def work() -> None:
            # Cancelled where nobody waits for it any more: it could change variables much later.
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(compute())
                except Exception as error:  # noqa: BLE001  # raised where it is waited for
                    answer.set_exception(error)

        self._inbox.put(work)
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            answer.cancel()
            raise

    def wait(self, check: Callable[[], None]) -> Move:
        """Wait until the thread is resumed. `check`, every moment, raises what ends the wait."""
        while True:
            try:
                message = self._inbox.get(timeout=_POLL_S)
            except queue.Empty:
                check()
                continue
            if isinstance(message, Move):
                return message
            message()


class Debugger(Component):
    """Stops threads of this rank before lines. `names` gives the user's global ones."""

    def __init__(
        self,
        main_thread: MainThread,
        gate: PauseGate,
        user_code: UserCode,
        events: Events,
        names: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.enabled = True
        """False: all breakpoints are passed, `breakpoint()` too."""
        self._main_thread = main_thread
        self._gate = gate
        self._user_code = user_code
        self._events = events
        self.breakpoints = Breakpoints(user_code.is_users, names, sys_stdout)
        kind = Monitoring if hasattr(sys, "monitoring") else Tracing  # from Python 3.12 on
        self.backend: Backend = kind(self._on_line, self.breakpoints.canonical)
        self._run = 0
        self._pid = os.getpid()
        self._count = itertools.count(1)
        self._turn = threading.Lock()
        """Held by the one thread that is paused at a line."""
        self.stopped: Stop | None = None
        """Its stop; None while no thread is paused."""
        self._inside: set[int] = set()
        """Threads that are in here: what they evaluate meanwhile is not stopped."""
        self._passing: dict[int, tuple[int, int]] = {}
        """By thread: the frame and the line where it stopped as its step was over, so that a
        breakpoint there does not stop it again."""
        self._after_gate: Move | None = None
        self._pauses_all = False
        """A breakpoint is set on collectives."""
        # Anonymous memory is shared with forks, and with nothing else: no file, no lock to inherit.
        self._said_in_child = mmap.mmap(-1, 1)
        """A byte that processes forked from this one share: one of them has said it."""
        self.armed = Armed()
        self.watch_values: Callable[[bool], None] = lambda wanted: None
        """Has losses and gradients looked at: a breakpoint is set on those that are not finite."""
        self.watch_lines: Callable[[Lines], None] = lambda lines: None
        """Gets the lines of breakpoints before the back end does."""
        gate.on_leave = self._left_gate

    # -- moments of the rank ---------------------------------------------------------------

    def attach(self) -> None:
        """Hear of modules that are loaded, and of forks."""

        def loads(file: str) -> None:
            self.breakpoints.loads(file)
            self._watch()

        def in_child() -> None:
            # A worker of a DataLoader is no rank: nothing is stopped there.
            self._run, self.enabled = 0, False
            self.backend.forget()

        self.armed.on_load = loads
        self.armed.attach(self._user_code.is_users)
        os.register_at_fork(after_in_child=in_child)

    def run_begins(self, run: Run) -> None:
        """From now on lines are those of this run."""
        self._run = run.number
        self._passing.clear()
        self.breakpoints.run_begins()
        self._said_in_child[0] = 0
        self._gate.paused |= self._pauses_all
        self.armed.in_run(self._gate.paused)
        if self.backend.lines:
            # On Python 3.11 an abort at a stop has left the trace function of this thread with an
            # error: Python then has removed it.
            self._watch(again=True)

    def run_ends(self) -> None:
        """Resume threads that outlive the run, and cancel all steps."""
        self._run = 0
        if (stop := self.stopped) is not None:
            stop.resume(Move(How.END))
        self.backend.forget()
        self.armed.in_run(paused=False)

    def begins(self, tree: ast.Module, file: str) -> None:
        """A cell or a script is about to run: `tree`, compiled as `file`."""
        self.armed.runs(tree)
        self.armed.loaded.add(file)
        self.breakpoints.adopt(tree, file)
        self._watch()

    def _watch(self, *, again: bool = False) -> None:
        """Have the back end watch the lines of breakpoints, unless it does."""
        lines = self.breakpoints.lines if self.enabled else {}
        if again or lines != self.backend.lines:
            self.watch_lines(lines)
            self.backend.watch(lines)

    # -- reasons to stop -------------------------------------------------------------------

    def on_breakpoint(self, frame: FrameType | None, why: str) -> bool:
        """`breakpoint()`, or another debugger's way to say it, in `frame`; whether it stopped."""
        users, _ = self._user_code.innermost(frames.frames_of(frame))
        frame = users or frame
        if frame is None or not self._may_stop():
            return False
        if self._passing.pop(threading.get_ident(), None) != (id(frame), frame.f_lineno):
            self._stop(frame, why)
        return True

    def occurred(self, on: str, frame: FrameType, what: str) -> None:
        """`what` happened: stop in the user's innermost frame, if a breakpoint is set on it."""
        users, _ = self._user_code.innermost(frames.frames_of(frame))
        if users is None or not self._may_stop():
            return
        with self.aside():
            reasons = self.breakpoints.occurred(on, users)
        if reasons:
            self._stop(users, f"{what}; {'; '.join(reasons)}")

    def raised(self, error: BaseException) -> None:
        """Stop where `error`, which ends the run, was raised, if a breakpoint is set on that.

        An interrupt or an abort ends the stop, and what ran ends with its own error.
        """
        places = frames.raised_in(error.__traceback__, self._user_code.is_users)
        is_error = isinstance(error, Exception) and not isinstance(error, Aborted)
        if not (is_error and places and self._may_stop()):
            return
        with self.aside():
            reasons = self.breakpoints.occurred("exception", places[0][0])
        if reasons:
            with contextlib.suppress(KeyboardInterrupt, Aborted):
                self._stop(places[0][0], f"raised {type(error).__name__}", places)

    def _on_line(self, frame: FrameType, has_breakpoints: bool) -> None:
        """A line is about to run; `has_breakpoints`: those of the line were not looked at."""
        if not self._may_stop():
            if has_breakpoints and os.getpid() != self._pid:
                # A process that this one forked passes a breakpoint. No other pass is of interest,
                # and without the lines the process is faster.
                self.backend.watch({})
                if not self._said_in_child[0]:  # once in a run
                    self._said_in_child[0] = 1
                    sys_stdout(
                        f"A breakpoint was passed at {self._user_code.describe(frame)}, in a "
                        "process that the rank started, such as a DataLoader's worker: none stops "
                        "there. To stop there: DataLoader(num_workers=0)\n"
                    )
            return
        goal = self.backend.goal
        reached = goal is not None and goal.reached(frame)
        reasons: tuple[str, ...] = ()
        if has_breakpoints:
            with self.aside():
                # Threads of Jupyter's and of ours run a library's lines as well.
                if self._user_code.has_called(frame):
                    reasons = self.breakpoints.hit(frame)
        if reached:
            self._passing[threading.get_ident()] = id(frame), frame.f_lineno
        elif not reasons:
            return
        self._stop(frame, "; ".join(reasons))

    def _may_stop(self) -> bool:
        return bool(self._run) and self.enabled and not self.is_aside

    @property
    def is_aside(self) -> bool:
        """This thread evaluates an expression, or is in code of ours: it stops nowhere."""
        return threading.get_ident() in self._inside

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Within, this thread stops nowhere: it does not run what the user runs."""
        thread = threading.get_ident()
        self._inside.add(thread)
        try:
            yield
        finally:
            self._inside.discard(thread)

    # -- a stop ----------------------------------------------------------------------------

    def _stop(self, frame: FrameType, why: str, over: Places = ()) -> None:
        """Wait here until this thread is resumed. Raises KeyboardInterrupt, Aborted."""
        self.armed.in_run()
        with self.aside():
            # One thread at a time: the session moves a rank, and knows of no threads. Another one
            # that comes to a breakpoint meanwhile is next.
            while not self._turn.acquire(timeout=_POLL_S):
                self._main_thread.end_if_aborted()
            stop = self.stopped = Stop(next(self._count), frame, why, over)
            main = self._main_thread
            try:
                main.paused_at, main.paused_in = self._user_code.describe(frame), frame
                # What was printed before the stop is shown before it.
                self._events.collect()
                code, first = frame.f_code, max(1, stop.line - 3)
                at, lines = shown(code, stop.line), lines_of(code.co_filename)
                edited = self.armed.loaded.note(code.co_filename)
                in_main = stop.thread is threading.main_thread()
                self._events.emit_now(
                    LineStopped,
                    cell=self._run,
                    stop=stop.number,
                    file=at.file,
                    line=stop.line,
                    function=at.function,
                    why="; ".join(filter(None, (why[:300], edited))),
                    thread="" if in_main else stop.thread.name,
                    first=first,
                    source=tuple(e.rstrip("\r\n")[:160] for e in lines[first - 1 : stop.line + 3]),
                )
                order = stop.wait(main.end_if_aborted)
            except BaseException:
                # Otherwise the session knows that the thread has left: it has ordered it.
                self._events.emit_now(LineLeft, cell=self._run, stop=stop.number)
                raise
            finally:
                # Before the turn is given up: the next thread to stop sets all three, and must find
                # them its own.
                self.stopped, main.paused_at, main.paused_in = None, "", None
                self._turn.release()
        if not over:  # where an error was raised there is no next line
            self._resume(order, frame)

    def _resume(self, order: Move, frame: FrameType) -> None:
        """Resume this thread, which was paused at `frame`, as ordered."""
        goal: Goal | None = None
        if order.how in (How.COLLECTIVE, How.END):
            # The gate pauses the thread before its next collective; no line is a goal.
            self._gate.paused = order.how is How.COLLECTIVE
        else:
            goal = Goal(order.how, frame, order.line, self._user_code.is_users)
            if not (goal.frames or goal.into):  # out of a function that nobody of the user's calls
                goal = None
        try:
            self.backend.step(goal, frame)
        except RuntimeError as error:  # a profiler may have what stepping needs
            sys.stderr.write(f"This rank cannot be stepped, and the code continued: {error}\n")

    def _left_gate(self) -> None:
        """The main thread was paused before a collective, and issues it now."""
        order, self._after_gate = self._after_gate, None
        if order is not None:
            frame, _ = self._user_code.innermost(frames.frames_of(sys._getframe(1)))
            if frame is not None:
                self._resume(order, frame)

    def places(self, stop: Stop) -> Places:
        """The user's frames of a paused thread, innermost first, and that where it is paused."""
        is_users = self._user_code.is_users
        inner = frames.chain(stop.frame)
        own = (f for f in inner if f is stop.frame or is_users(f.f_code.co_filename))
        return stop.over or [(f, f.f_lineno) for f in own]

    # -- questions -------------------------------------------------------------------------

    def move(self, order: Move) -> calls.Moved:
        """Resume the thread that is paused at a line or before a collective. Any thread."""
        stop, gate = self.stopped, self._gate
        if stop is None:
            # The main thread may be paused before a collective.
            if gate.at is None:
                if order.how is How.END:  # a step that is under way ends nowhere
                    self.backend.release()
                    gate.resume()
                return calls.Moved(0)
            if order.how is How.COLLECTIVE:
                return calls.Moved(0, collective=gate.step())
            self._after_gate = order
            return calls.Moved(0, collective=gate.resume())
        if stop.ordered:
            return calls.Moved(stop.number)
        if stop.over and order.how not in (How.NEXT, How.END):
            raised = "it is paused where an error was raised, which ends what runs"
            return calls.Moved(0, f"{raised}; it can continue with that: %ddp_step")
        frame = with_line(stop.frame, order.line)
        if order.how is How.LINE and not has_line(frame, order.line):
            function = frames.own_name(frame.f_code).replace(
                "<module>", "the code outside functions"
            )
            return calls.Moved(
                0,
                f"line {order.line} is not in {function}, where it is paused; elsewhere a "
                "breakpoint stops it: %ddp_break LINE, then %ddp_step --to end",
            )
        stop.resume(order)
        return calls.Moved(stop.number)

    def set_breakpoints(self, wanted: calls.Breakpoints) -> calls.Bounds:
        """Have these breakpoints and no others; where each is. Any thread."""
        self.enabled = wanted.enabled
        self.breakpoints.replace(wanted.breakpoints)
        self._watch(again=True)
        self.armed.breakpoints(enabled=wanted.enabled, there=wanted.may_stop)
        wants = self.breakpoints.wants
        self.watch_values(wanted.enabled and wants("nan"))
        pauses, self._pauses_all = self._pauses_all, wanted.enabled and wants("collective")
        if pauses != self._pauses_all:  # else the gate is as the user's steps have left it
            self._gate.paused = self._pauses_all and bool(self._run)
        return self._bounds()

    def bounds(self) -> calls.Bounds:
        """Where each breakpoint is, and how often it was passed. Any thread."""
        self.breakpoints.bind_pending()
        self._watch()
        return self._bounds()

    def _bounds(self) -> calls.Bounds:
        return calls.Bounds(self.breakpoints.bounds(self.backend.unseen()))

    def arm(self) -> calls.Nothing:
        """Another rank of this run is paused: this one may wait for it. Any thread."""
        if self._run:
            self.armed.in_run()
        return calls.Nothing()


def sys_stdout(text: str) -> None:
    """Print for the user, wherever the rank's output goes now."""
    sys.stdout.write(text)
