"""The back end for Python 3.12 and later: sys.monitoring, which costs nothing until a stop.

It works in every thread, also in those of autograd, and in code that runs already.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any

from ddp_notebook.rank.debugger.goals import Goal
from ddp_notebook.rank.debugger.instrument import Lines
from ddp_notebook.rank.inspect.frames import chain

_NAME = "ddp-notebook"
_TOOLS = (3, 4, 1, 2, 5, 0)
"""Tools that Python has room for; 0 is meant for a debugger, and debugpy takes no other."""

OnLine = Callable[[FrameType, bool], None]


class Monitoring:
    """Tells `on_line` of the lines of threads that are stepped, and of those of breakpoints."""

    def __init__(self, on_line: OnLine, on_call: Any, canonical: Callable[[str], str]) -> None:
        self._on_line = on_line
        self._canonical = canonical
        self._goals: dict[int, Goal] = {}
        self._lines: Lines = {}
        self._conditions: dict[str, CodeType] = {}
        self._armed: dict[int, CodeType] = {}
        """Code with events of its own, by its id: equal code of another function has its own."""
        self._tool = -1
        self._monitoring: Any = getattr(sys, "monitoring", None)

    # -- breakpoints ---------------------------------------------------------------------

    def watch(self, lines: Lines) -> Mapping[str, str]:
        """Stop before these lines, and before no others; by file, why one cannot be."""
        conditions = {each for of_file in lines.values() for each in of_file.values() if each}
        self._conditions = {
            condition: compile(condition, "<condition>", "eval") for condition in conditions
        }
        self._lines = lines
        if lines:
            self._begin()
            for innermost in sys._current_frames().values():
                for frame in chain(innermost):
                    self._arm_if_watched(frame.f_code)
        self._set_events()
        self._end_if_idle()
        return {}

    def unseen(self) -> Mapping[tuple[str, int], str]:
        """Where a thread does not stop: nowhere."""
        return {}

    def compiled(self, tree: Any, file: str) -> Any:
        """A module that is compiled as `file` needs no calls of ours."""
        return tree

    def was_compiled(self, code: CodeType) -> None:
        """Code needs nothing before it runs."""

    # -- stepping ------------------------------------------------------------------------

    def step(self, goal: Goal | None, frame: FrameType) -> None:
        """This thread continues from `frame` to `goal`; None: to the next breakpoint."""
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

    def goal(self) -> Goal | None:
        """This thread's goal."""
        return self._goals.get(threading.get_ident())

    def release(self) -> None:
        """No thread is stepped any more."""
        if self._goals:
            self._goals.clear()
            self._set_events()

    def give_way(self) -> None:
        """Another debugger moves this thread on, with a tool of its own."""
        if self._goals.pop(threading.get_ident(), None) is not None:
            self._set_events()

    def forget(self) -> None:
        """The same, and what is of no use goes: no other thread is in here."""
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
        monitoring.use_tool_id(self._tool, _NAME)
        for event, callback in self._callbacks().items():
            monitoring.register_callback(self._tool, event, callback)

    def _end_if_idle(self) -> None:
        """With nothing to stop at, be no tool of Python's: others may need the place."""
        if self._tool < 0 or self._lines or self._goals:
            return
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
        if self._lines or any(goal.into for goal in tuple(self._goals.values())):
            wanted |= events.PY_START | events.PY_RESUME
        if self._goals:
            wanted |= events.PY_UNWIND
        self._monitoring.set_events(self._tool, wanted)
        self._monitoring.restart_events()

    def _arm(self, code: CodeType) -> None:
        if id(code) not in self._armed:
            self._armed[id(code)] = code
            events = self._monitoring.events
            wanted = events.LINE | events.PY_RETURN | events.PY_YIELD
            self._monitoring.set_local_events(self._tool, code, wanted)

    def _arm_if_watched(self, code: CodeType) -> None:
        lines = self._lines.get(self._canonical(code.co_filename))
        if lines and any(line in lines for _, _, line in code.co_lines()):
            self._arm(code)

    def _start(self, code: CodeType, offset: int) -> Any:
        self._arm_if_watched(code)
        goal = self._goals.get(threading.get_ident())
        if goal is not None and goal.into and goal.is_users(code.co_filename):
            self._arm(code)
        into = any(goal.into for goal in tuple(self._goals.values()))
        return None if into else self._monitoring.DISABLE

    def _line(self, code: CodeType, line: int) -> Any:
        condition = self._lines.get(self._canonical(code.co_filename), {}).get(line)
        stepped = threading.get_ident() in self._goals
        if condition is None and not stepped:
            return None if self._goals else self._monitoring.DISABLE
        frame = sys._getframe(1)
        if stepped or not condition or self._may_hold(condition, frame):
            self._on_line(frame, condition is not None)
        return None

    def _may_hold(self, condition: str, frame: FrameType) -> bool:
        """False where the debugger need not look at this pass."""
        try:
            return bool(eval(self._conditions[condition], frame.f_globals, frame.f_locals))  # noqa: S307
        except Exception:  # noqa: BLE001  # the user's condition: the debugger says that it raises
            return True

    def _return(self, code: CodeType, offset: int, value: Any) -> Any:
        return self._left(sys._getframe(1), yielded=False)

    def _yield(self, code: CodeType, offset: int, value: Any) -> Any:
        return self._left(sys._getframe(1), yielded=True)

    def _unwind(self, code: CodeType, offset: int, error: BaseException) -> None:
        self._left(sys._getframe(1), yielded=False)

    def _left(self, frame: FrameType, *, yielded: bool) -> Any:
        thread = threading.get_ident()
        goal = self._goals.get(thread)
        if goal is not None and goal.left(frame, yielded=yielded):
            for outer in goal.frames:
                self._arm(outer.f_code)
            if not goal.frames:
                self._goals.pop(thread, None)
            self._set_events()
        return None if self._goals else self._monitoring.DISABLE


def is_there() -> bool:
    """True from Python 3.12 on."""
    return inspect.ismodule(getattr(sys, "monitoring", None))
