"""The back end for Python 3.11: sys.settrace while a thread is stepped, and nothing else.

Breakpoints are calls of ours in the code: see `instrument` and `code_swap`. Only code that ran
already when its breakpoint was set is traced, until it returns.
"""

from __future__ import annotations

import ctypes
import opcode
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import AsyncGeneratorType, CodeType, CoroutineType, FrameType, GeneratorType
from typing import Any

from ddp_notebook.rank.debugger.code_swap import CodeSwap, lines_in
from ddp_notebook.rank.debugger.goals import Goal, can_be_suspended
from ddp_notebook.rank.debugger.instrument import Lines
from ddp_notebook.rank.inspect.frames import chain
from ddp_notebook.rank.variables.objects import objects_of

_FRAME_OF: Mapping[type, str] = {
    GeneratorType: "gi_frame",
    CoroutineType: "cr_frame",
    AsyncGeneratorType: "ag_frame",
}
_YIELDS = opcode.opmap["YIELD_VALUE"]
_PENDING_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)

OnLine = Callable[[FrameType, bool], None]
"""Told of a line about to run; whether its breakpoints are to be looked at too."""


class Tracing:
    """Tells `on_line` of the lines of threads that are stepped. `canonical` names files."""

    def __init__(
        self, on_line: OnLine, on_call: Callable[[FrameType, int], None], canonical: Any
    ) -> None:
        self._on_line = on_line
        self._canonical = canonical
        self._goals: dict[int, Goal] = {}
        self._lines: Lines = {}
        self._swap = CodeSwap(on_call, canonical)
        self._suspended: list[FrameType] = []
        """Of generators and coroutines that began before their breakpoints were set."""
        self._followed: dict[int, set[FrameType]] = {}
        """By thread: frames with breakpoints that ran already when these were set."""
        self._theirs: dict[int, tuple[Any, dict[FrameType, Any]]] = {}
        """By thread: what the user traces it and frames of it with, and gets back."""
        self._defines: dict[CodeType, frozenset[int]] = {}
        """By code that ran already: the lines at which it defines what has breakpoints."""
        self._defining: set[FrameType] = set()
        """Frames that have begun such a line."""
        self._swaps = threading.RLock()
        self._pending = _PENDING_CALL(self._arm_main_thread)

    # -- breakpoints ---------------------------------------------------------------------

    def watch(self, lines: Lines) -> Mapping[str, str]:
        """Stop before these lines, and before no others; by file, why one cannot be."""
        self._lines = lines
        self._defines.clear()
        with self._swaps:
            problems = self._swap.apply(lines)
        if not lines:
            self._followed.clear()  # each thread finds that out at its next line
        self._suspended = list(self._without_calls(_suspended())) if lines else []
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        if lines and (self._suspended or self._to_follow(main)):
            ctypes.pythonapi.Py_AddPendingCall(self._pending, None)
        return problems

    def unseen(self) -> Mapping[tuple[str, int], str]:
        """By file and line, where a thread does not stop: it was in that function already."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        names.pop(threading.main_thread().ident, None)
        notes = {}
        for thread, innermost in sys._current_frames().items():
            for frame in self._to_follow(innermost) if thread in names else ():
                file = self._canonical(frame.f_code.co_filename)
                for _, _, line in frame.f_code.co_lines():
                    if line and line in self._lines[file]:
                        notes[file, line] = (
                            f"thread {names[thread]} is in this function already, and stops there "
                            "from its next call on"
                        )
        return notes

    def compiled(self, tree: Any, file: str) -> Any:
        """The module `tree` with our calls before its breakpoints; to be compiled as `file`."""
        return self._swap.instrumented(tree, file)

    def was_compiled(self, code: CodeType) -> None:
        """This is what it was compiled to."""
        self._swap.compiled(code)

    def _arm_main_thread(self, _: object) -> int:
        """Called by Python between two instructions of the main thread."""
        thread = threading.get_ident()
        if thread not in self._goals:
            self._follow(thread, sys._getframe(1))
        return 0

    def _to_follow(self, frame: FrameType | None) -> list[FrameType]:
        return list(self._without_calls(chain(frame))) if self._lines else []

    def _without_calls(self, frames: Iterable[FrameType]) -> Iterator[FrameType]:
        """Those in files with breakpoints whose code began to run without our calls."""
        for frame in frames:
            watched = self._canonical(frame.f_code.co_filename) in self._lines
            if watched and not self._swap.is_ours(frame.f_code):
                yield frame

    def _follow(self, thread: int, frame: FrameType | None) -> None:
        """Trace the frames that have breakpoints and ran before these were set."""
        frames = {*self._to_follow(frame), *self._suspended}
        if frames:
            self._followed[thread] = frames
            self._trace(thread, frames)
        elif self._followed.pop(thread, None) is not None and thread not in self._goals:
            self._untrace()

    # -- stepping ------------------------------------------------------------------------

    def step(self, goal: Goal | None, frame: FrameType) -> None:
        """This thread continues from `frame` to `goal`; None: to the next breakpoint."""
        thread = threading.get_ident()
        self._goals.pop(thread, None)
        if goal is not None:
            self._goals[thread] = goal
            self._trace(thread, goal.frames)
        self._follow(thread, frame)
        if goal is None and thread not in self._followed:
            self._untrace()

    def _trace(self, thread: int, frames: Iterable[FrameType]) -> None:
        """Trace these frames of this thread. What the user traces it with sees nothing meanwhile:
        it cannot be called from here, as coverage's would then take our place."""
        before = sys.gettrace()
        if before != self._global:
            self._theirs[thread] = before, {}
            sys.settrace(self._global)
        theirs, own = self._theirs[thread]
        for frame in frames:
            if theirs is not None:
                own.setdefault(frame, frame.f_trace)
            frame.f_trace = self._local

    def _untrace(self) -> None:
        """Trace this thread no more."""
        if sys.gettrace() == self._global:
            theirs, own = self._theirs.pop(threading.get_ident(), (None, {}))
            for frame, trace in own.items():
                frame.f_trace = trace
            sys.settrace(theirs)

    def goal(self) -> Goal | None:
        """This thread's goal."""
        return self._goals.get(threading.get_ident())

    def release(self) -> None:
        """No thread is stepped any more: each finds that out at its next line."""
        self._goals.clear()

    def give_way(self) -> None:
        """Another debugger moves this thread on, with a trace function of its own."""
        thread = threading.get_ident()
        self._goals.pop(thread, None)
        self._followed.pop(thread, None)

    def forget(self) -> None:
        """This thread is stepped no more, and no goal of others counts."""
        self._goals.clear()
        self._followed.clear()
        self._suspended.clear()
        self._defining.clear()
        self._defines.clear()
        self._untrace()

    def _global(self, frame: FrameType, event: str, arg: Any) -> Any:
        goal = self._goals.get(threading.get_ident())
        if goal is not None and goal.into:
            return self._local
        # The body of a class, say: what it defines has breakpoints.
        return self._local if self._defines_at(frame.f_code) else None

    def _defines_at(self, code: CodeType) -> frozenset[int]:
        """The lines at which code without our calls makes functions that are to have them."""
        lines = self._defines.get(code)
        if lines is None:
            wanted = self._lines.get(self._canonical(code.co_filename), {})
            inner = (const for const in code.co_consts if isinstance(const, CodeType))
            lines = frozenset(
                each.co_firstlineno
                for each in (inner if wanted and not self._swap.is_ours(code) else ())
                if any(line in wanted for line in lines_in(each))
            )
            self._defines[code] = lines
        return lines

    def _swap_defined(self, frame: FrameType) -> None:
        """Give our calls to what the last line of `frame` has defined, if it has."""
        if frame in self._defining:
            self._defining.discard(frame)
            with self._swaps:
                self._swap.apply(self._lines)

    def _local(self, frame: FrameType, event: str, arg: Any) -> Any:
        thread = threading.get_ident()
        self._swap_defined(frame)
        if event == "line":
            if frame.f_lineno in self._defines_at(frame.f_code):
                self._defining.add(frame)
            self._on_line(frame, self._swap.lacks_call(frame.f_code, frame.f_lineno))
        elif event == "return":
            self._left(thread, frame, yielded=_yields(frame))
        if thread not in self._goals and thread not in self._followed:
            self._untrace()
            return None
        return self._local

    def _left(self, thread: int, frame: FrameType, *, yielded: bool) -> None:
        goal = self._goals.get(thread)
        if goal is not None and goal.left(frame, yielded=yielded):
            self._trace(thread, goal.frames)
            if not goal.frames:
                self._goals.pop(thread, None)
        if yielded:
            return
        if thread in self._theirs:
            self._theirs[thread][1].pop(frame, None)
        if frame in self._suspended:
            self._suspended.remove(frame)
        followed = self._followed.get(thread, set())
        followed.discard(frame)
        if not followed:
            self._followed.pop(thread, None)


def _suspended() -> Iterator[FrameType]:
    """The frames of all suspended generators and coroutines."""
    for each in objects_of(*_FRAME_OF):
        if (frame := getattr(each, _FRAME_OF[type(each)])) is not None:
            yield frame


def _yields(frame: FrameType) -> bool:
    """Whether a frame that is left stays suspended."""
    return can_be_suspended(frame) and frame.f_code.co_code[frame.f_lasti] == _YIELDS
