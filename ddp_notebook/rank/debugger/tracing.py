"""The back end for Python 3.11: sys.settrace, while a breakpoint is set or a thread is stepped.

Python then calls `_global` for each function that is called, and `_local` for each line of those
that have breakpoints or are stepped: code that calls many functions runs several times slower, as
under pdb. With no breakpoint set, and no step under way, nothing is traced.

Each thread has a trace function of its own, and only itself can set it. So a thread is traced
- when it begins: `threading.settrace`;
- when it is resumed at a stop: by itself;
- the main thread, whatever it is at, by a call that Python makes in it between two instructions.
Other threads that ran before the breakpoint was set, and threads of torch's own (gloo's, those of
autograd on a GPU), which Python does not start, pass it. `breakpoint()` is a call: it stops them.
"""

from __future__ import annotations

import ctypes
import inspect
import opcode
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

from ddp_notebook.rank.debugger.lines import Backend, Goal, Lines, OnLine
from ddp_notebook.rank.inspect.frames import chain

_OUR_THREADS = "ddp-"
"""How the names of threads of this package begin: no code of the user's runs in them."""
_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_YIELDS = opcode.opmap["YIELD_VALUE"]
_PENDING_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class Tracing(Backend):
    """Traces threads. What the user traces them with sees nothing meanwhile, and is given back."""

    def __init__(self, on_line: OnLine, canonical: Callable[[str], str]) -> None:
        super().__init__(on_line, canonical)
        self._codes: dict[int, tuple[CodeType, bool]] = {}
        """By id, which is kept from being another's: whether code has lines of breakpoints."""
        self._traced: set[int] = set()
        """Threads that began while there were breakpoints, or were told of these."""
        self._theirs: dict[int, tuple[Any, dict[FrameType, Any]]] = {}
        """By thread: what the user traces it and frames of it with."""
        self._theirs_for_new: Any = None
        """The user's trace function for threads that begin."""
        # Kept: Python calls it later, and a callback of ctypes that was freed by then would crash.
        self._pending = _PENDING_CALL(self._trace_main_thread)

    def watch(self, lines: Lines) -> None:
        """Stop before these lines, and before no others. Any thread."""
        # In this order: a thread that fetches the codes before the files may keep what it finds of
        # new files among the old codes, which nobody reads any more; the other way round it could
        # keep what it finds of old files among the new ones.
        super().watch(lines)
        self._codes = {}
        ours = threading.gettrace() == self._begin
        if not lines:  # each thread finds that out by itself
            if ours:
                threading.settrace(self._theirs_for_new)
            return
        if not ours:
            self._theirs_for_new = threading.gettrace()
            self._traced.clear()
            threading.settrace(self._begin)
        if threading.current_thread() is threading.main_thread():
            self._trace_main_thread(None)
        else:
            # While it waits in C, in a collective say, the call is made once it is back in Python:
            # no line runs before.
            ctypes.pythonapi.Py_AddPendingCall(self._pending, None)

    def _trace_main_thread(self, _: object) -> int:
        """Called by Python between two instructions of the main thread."""
        if self.lines:
            self._trace(self._with_lines(sys._getframe(1)))
        return 0

    def unseen(self) -> Mapping[tuple[str, int], str]:
        """By file and line, which threads are in that function and do not stop there."""
        # They could be traced by `_PyEval_SetTrace` alone, a private function that takes a thread
        # state: of a thread that ends meanwhile it is freed memory. A note hurts nobody.
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        names.pop(threading.main_thread().ident, None)
        others = [
            (names[thread], frame)
            for thread, innermost in (sys._current_frames().items() if self.lines else ())
            if thread in names and thread not in self._traced
            for frame in self._with_lines(innermost)
        ]
        return {
            (self._canonical(frame.f_code.co_filename), line): (
                f"thread {name} is in this function already, and passes: it began before the "
                "breakpoint was set"
            )
            for name, frame in others
            for line in self._files[frame.f_code.co_filename]
            if any(line == number for _, _, number in frame.f_code.co_lines())
        }

    def step(self, goal: Goal | None, frame: FrameType) -> None:
        """Resume this thread from `frame` to `goal`; None: to the next breakpoint."""
        thread = threading.get_ident()
        self._goals.pop(thread, None)
        if goal is not None:
            self._goals[thread] = goal
            self._trace(goal.frames)
        if self.lines:
            self._trace(self._with_lines(frame))
        elif goal is None:
            self._untrace()

    def release(self) -> None:
        """Cancel all steps: each thread finds that out at its next line. Any thread."""
        self._goals.clear()

    def forget(self) -> None:
        """Cancel all steps, and trace this thread no more unless there are breakpoints."""
        self._goals.clear()
        if not self.lines:
            self._untrace()

    # -- this thread -----------------------------------------------------------------------

    def _trace(self, frames: Iterable[FrameType]) -> None:
        """Trace this thread, and these frames of it that run already.

        The user's trace function cannot be called from here: coverage's would take our place.
        """
        thread = threading.get_ident()
        before = sys.gettrace()
        # `!=`, and not `is not`: a bound method is made anew each time that it is read.
        if before != self._global:
            self._theirs[thread] = before, {}
            sys.settrace(self._global)
        self._traced.add(thread)
        theirs, own = self._theirs[thread]
        for frame in frames:
            if theirs is not None:
                own.setdefault(frame, frame.f_trace)
            frame.f_trace = self._local

    def _untrace(self) -> None:
        if sys.gettrace() == self._global:
            theirs, own = self._theirs.pop(threading.get_ident(), (None, {}))
            for frame, trace in own.items():
                frame.f_trace = trace
            sys.settrace(theirs)

    def _begin(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Trace a thread that begins, from the first function that it calls on."""
        # First the user's, so that it is what `_trace` finds here, and gives back.
        sys.settrace(self._theirs_for_new)
        if threading.current_thread().name.startswith(_OUR_THREADS):
            return None
        self._trace(())
        return self._global(frame, event, arg)

    def _global(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Called as a function begins, or a generator goes on: what is called for its lines."""
        # Each call of a traced thread comes here, so the usual case is decided at once: a file
        # without breakpoints, while no thread is stepped.
        if self.lines and not self._goals and not self._files[frame.f_code.co_filename]:
            return None
        goal = self.goal
        if goal is None and not self.lines:
            self._untrace()
            return None
        is_watched = self._has_lines(frame.f_code) or (goal and goal.enters(frame.f_code))
        return self._local if is_watched else None

    def _local(self, frame: FrameType, event: str, arg: Any) -> Any:
        # An error that leaves this function, as an abort at a stop does, reaches the user's code
        # at this line, and has Python take the trace function of the thread away. The run has
        # ended then; the next one sets it again.
        if event == "line":
            self._comes_to(frame, frame.f_lineno)
        elif event == "return":
            # It is the event of all: of a return, a yield, an await, and an error that leaves the
            # frame. The instruction tells them apart.
            code = frame.f_code
            suspends = code.co_flags & _SUSPENDED and code.co_code[frame.f_lasti] == _YIELDS
            is_left = not suspends
            if (goal := self._leaves(frame, yielded=not is_left)) is not None:
                self._trace(goal.frames)
            thread = threading.get_ident()
            if is_left and thread in self._theirs:
                self._theirs[thread][1].pop(frame, None)
        if self.goal is None and not self.lines:
            self._untrace()
            return None
        return self._local

    def _with_lines(self, innermost: FrameType | None) -> Iterator[FrameType]:
        return (frame for frame in chain(innermost) if self._has_lines(frame.f_code))

    def _has_lines(self, code: CodeType) -> bool:
        """As ever, and remembered: it is asked for each call. Code is slow to look up by itself."""
        if not self._files[code.co_filename]:
            return False
        codes = self._codes
        known = codes.get(id(code))
        if known is None:
            known = codes[id(code)] = code, super()._has_lines(code)
        return known[1]
