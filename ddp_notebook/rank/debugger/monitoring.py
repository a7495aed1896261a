"""The back end for Python 3.12 and later: sys.monitoring, which costs nothing until a stop.

It works in every thread, also in those of autograd, and in code that runs already. Events are set
for each code object that has lines to stop at, as it begins; what else begins is looked at once.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from ddp_notebook.rank.debugger.lines import Backend, Goal, Lines, OnLine
from ddp_notebook.rank.inspect.frames import chain

_TOOLS = (3, 4, 1, 2, 5, 0)
"""Tools that Python has room for; 0 is meant for a debugger, and debugpy takes no other."""


class Monitoring(Backend):
    """Has Python call it at lines, and at the beginnings and ends of functions."""

    def __init__(self, on_line: OnLine, canonical: Callable[[str], str]) -> None:
        super().__init__(on_line, canonical)
        self._armed: dict[int, CodeType] = {}
        """Code with events of its own, by its id: equal code of another function has its own."""
        self._tool = -1
        self._monitoring: Any = getattr(sys, "monitoring", None)

    def watch(self, lines: Lines) -> None:
        """Stop before these lines, and before no others. Any thread."""
        super().watch(lines)
        if lines:
            self._begin()
            # A function that runs already has had its PY_START, so its events are set here. One
            # that another thread begins between this look and `_set_events` is not stopped in this
            # call of it: Python has no way to do both at once.
            for innermost in sys._current_frames().values():
                for frame in chain(innermost):
                    if self._has_lines(frame.f_code):
                        self._arm(frame.f_code)
        self._set_events()
        self._end_if_idle()

    def step(self, goal: Goal | None, frame: FrameType) -> None:
        """Resume this thread from `frame` to `goal`; None: to the next breakpoint."""
        thread = threading.get_ident()
        before = self._goals.pop(thread, None)
        if goal is not None:
            self._begin()
            self._goals[thread] = goal
            for outer in goal.frames:
                self._arm(outer.f_code)
        if goal is not None or before is not None:
            self._set_events()
        if goal is None:
            self._end_if_idle()

    def release(self) -> None:
        """Cancel all steps; breakpoints stop as before. Any thread."""
        if self._goals:
            self._goals.clear()
            self._set_events()

    def forget(self) -> None:
        """Cancel all steps, and be no tool of Python's without breakpoints."""
        self.release()
        self._end_if_idle()

    # -- events --------------------------------------------------------------------------

    def _begin(self) -> None:
        """Become a tool of Python's, once. Raises RuntimeError when there is no room."""
        if self._tool >= 0:
            return
        monitoring = self._monitoring
        free = [tool for tool in _TOOLS if monitoring.get_tool(tool) is None]
        if not free:
            raise RuntimeError("other tools (profilers, debuggers) use all of sys.monitoring")
        self._tool = free[0]
        monitoring.use_tool_id(self._tool, "ddp-notebook")
        for event, callback in self._callbacks().items():
            monitoring.register_callback(self._tool, event, callback)

    def _end_if_idle(self) -> None:
        """With nothing to stop at, be no tool of Python's: others may need the place."""
        if self._tool < 0 or self.lines or self._goals:
            return
        # The events of code stay when a tool is freed: who takes its place would get them.
        for code in self._armed.values():
            self._monitoring.set_local_events(self._tool, code, 0)
        self._armed.clear()
        tool, self._tool = self._tool, -1
        for event in self._callbacks():
            self._monitoring.register_callback(tool, event, None)
        self._monitoring.free_tool_id(tool)

    def _callbacks(self) -> dict[int, Callable[..., Any]]:
        events = self._monitoring.events
        return {
            events.LINE: self._line,
            events.PY_START: self._start,
            events.PY_RESUME: self._start,
            events.PY_RETURN: self._return,
            events.PY_YIELD: self._yield,
            events.PY_UNWIND: self._unwind,
        }

    def _set_events(self) -> None:
        if self._tool < 0:
            return
        events = self._monitoring.events
        wanted = 0
        if self.lines or self._enters_calls():
            wanted |= events.PY_START | events.PY_RESUME
        if self._goals:
            wanted |= events.PY_UNWIND
        self._monitoring.set_events(self._tool, wanted)
        # What was disabled for other breakpoints, or while no thread was stepped, counts again.
        self._monitoring.restart_events()

    def _enters_calls(self) -> bool:
        return any(goal.into for goal in tuple(self._goals.values()))

    def _arm(self, code: CodeType) -> None:
        # By identity: code objects with the same instructions are equal, as those of a cell that
        # has run twice, and each has events of its own. Kept, so that no other gets the id.
        if id(code) not in self._armed:
            self._armed[id(code)] = code
            events = self._monitoring.events
            wanted = events.LINE | events.PY_RETURN | events.PY_YIELD
            self._monitoring.set_local_events(self._tool, code, wanted)

    def _or_disable(self, wanted: object) -> Any:
        """Return the value that disables a callback at this place once it is not `wanted`."""
        # Disabled for all threads: so never while one is stepped, which may come by here.
        return None if wanted else self._monitoring.DISABLE

    def _line(self, _code: CodeType, line: int) -> Any:
        return self._or_disable(self._comes_to(sys._getframe(1), line) or self._goals)

    def _start(self, code: CodeType, _offset: int) -> Any:
        goal = self.goal
        if self._has_lines(code) or (goal is not None and goal.enters(code)):
            self._arm(code)
        return self._or_disable(self._enters_calls())

    def _return(self, _code: CodeType, _offset: int, _value: object) -> Any:
        return self._left(sys._getframe(1), yielded=False)

    def _yield(self, _code: CodeType, _offset: int, _value: object) -> Any:
        return self._left(sys._getframe(1), yielded=True)

    def _unwind(self, _code: CodeType, _offset: int, _error: BaseException) -> None:
        self._left(sys._getframe(1), yielded=False)  # of all code: it cannot be disabled

    def _left(self, frame: FrameType, *, yielded: bool) -> Any:
        goal = self._leaves(frame, yielded=yielded)
        if goal is not None:
            for outer in goal.frames:
                self._arm(outer.f_code)
            self._set_events()
        return self._or_disable(self._goals)
