"""Where threads are to stop: at the lines of breakpoints, and where a step ends.

`Backend` is how lines are seen: `Tracing` on Python 3.11, `Monitoring` from 3.12 on.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import CodeType, FrameType

from ddp_notebook.rank.calls import How
from ddp_notebook.rank.inspect.frames import IsUsers

Lines = Mapping[str, Mapping[int, str]]
"""By file, the lines of breakpoints, each with its plain condition: a thread for which that is
false need not be brought to the debugger. Empty where each pass is to be looked at."""
OnLine = Callable[[FrameType, bool], None]
"""Told of a line about to run; whether its breakpoints are to be looked at too."""

_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
"""Functions of their own before Python 3.12, and no more to who steps."""


class Goal:
    """Where a thread that continues from `frame` is to stop; hears of its lines and returns."""

    def __init__(self, how: How, frame: FrameType, line: int, is_users: IsUsers) -> None:
        self.into = how is How.INTO
        """A function of the user's that is called may be the goal."""
        self._line = line if how is How.LINE else 0
        frame = with_line(frame, line) if self._line else frame
        self._start = frame
        self._is_users = is_users
        self.frames: set[FrameType] = set()
        """The frames whose next line may be the goal."""
        if how is How.OUT:
            self._add_caller(frame)
        else:
            self.frames.add(frame)

    def enters(self, code: CodeType) -> bool:
        """Return True when the goal is in `code` if that is called now."""
        return self.into and self._is_users(code.co_filename)

    def reached(self, frame: FrameType) -> bool:
        """Return True when the thread stops at the line that `frame` is about to run."""
        if self.enters(frame.f_code):
            return True
        if frame not in self.frames:
            return False
        return frame is not self._start or not self._line or frame.f_lineno == self._line

    def left(self, frame: FrameType, *, yielded: bool) -> bool:
        """`frame` returns, raises or yields to its caller; True when that changes `frames`."""
        if frame not in self.frames:
            return False
        if not yielded:
            self.frames.discard(frame)
        self._add_caller(frame)
        return True

    def _add_caller(self, frame: FrameType) -> None:
        # Libraries between, such as `Module.__call__` around a forward, are passed over.
        caller = frame.f_back
        while caller is not None and not self._is_users(caller.f_code.co_filename):
            caller = caller.f_back
        if caller is not None:
            self.frames.add(caller)


class _Files(dict[str, Mapping[int, str]]):
    """The lines of each file, by whatever name code has for it.

    A new one for each set of breakpoints: what a thread still looks up in the one before cannot
    get into it.
    """

    def __init__(self, lines: Lines, canonical: Callable[[str], str]) -> None:
        super().__init__()
        self._lines = lines
        self._canonical = canonical

    def __missing__(self, name: str) -> Mapping[int, str]:
        found = self[name] = self._lines.get(self._canonical(name), {})
        return found


class Backend(ABC):
    """Tells `on_line` of the lines of breakpoints, and of those of threads that are stepped.

    `canonical` gives a file one name.
    """

    def __init__(self, on_line: OnLine, canonical: Callable[[str], str]) -> None:
        self._on_line = on_line
        self._canonical = canonical
        self.lines: Lines = {}
        """The lines of breakpoints."""
        self._files = _Files({}, canonical)
        self._conditions: dict[str, CodeType] = {}
        self._goals: dict[int, Goal] = {}
        """By thread, where its step ends."""

    def watch(self, lines: Lines) -> None:
        """Stop before these lines, and before no others. Any thread."""
        # Conditions first: a thread that sees the new lines finds the code of theirs.
        conditions = {each for of_file in lines.values() for each in of_file.values() if each}
        self._conditions = {each: compile(each, "<condition>", "eval") for each in conditions}
        self._files = _Files(lines, self._canonical)
        self.lines = lines

    def unseen(self) -> Mapping[tuple[str, int], str]:
        """By file and line, which threads do not stop there."""
        return {}

    @abstractmethod
    def step(self, goal: Goal | None, frame: FrameType) -> None:
        """Resume this thread from `frame` to `goal`; None: to the next breakpoint.

        Raises RuntimeError where that cannot be.
        """

    @abstractmethod
    def release(self) -> None:
        """Cancel all steps; breakpoints stop as before. Any thread."""

    @abstractmethod
    def forget(self) -> None:
        """Cancel all steps, and install nothing of no use. On the thread that was stepped."""

    @property
    def goal(self) -> Goal | None:
        """This thread's goal."""
        return self._goals.get(threading.get_ident())

    def _has_lines(self, code: CodeType) -> bool:
        lines = self._files[code.co_filename]
        return bool(lines) and any(line in lines for _, _, line in code.co_lines())

    def _comes_to(self, frame: FrameType, line: int) -> bool:
        """A line is about to run; False where it is of no interest."""
        # Cheap first: in a loop this decides what a breakpoint costs. A plain condition is looked
        # at here; the debugger would look at the stack as well, and at all of its reasons to stop.
        condition = self._files[frame.f_code.co_filename].get(line)
        is_stepped = threading.get_ident() in self._goals
        if condition is None and not is_stepped:
            return False
        may_hold = True
        if condition and not is_stepped:
            code = self._conditions.get(condition)  # None: others have been set meanwhile
            try:
                may_hold = code is None or bool(eval(code, frame.f_globals, frame.f_locals))  # noqa: S307
            except Exception:  # noqa: BLE001  # the user's: the debugger says that it raises
                may_hold = True
        if may_hold:
            self._on_line(frame, condition is not None)
        return True

    def _leaves(self, frame: FrameType, *, yielded: bool) -> Goal | None:
        """`frame` is left; the goal of this thread, if other frames are in it now."""
        goal = self.goal
        if goal is None or not goal.left(frame, yielded=yielded):
            return None
        if not goal.frames:
            self._goals.pop(threading.get_ident(), None)
        return goal


def with_line(frame: FrameType, line: int) -> FrameType:
    """Return `frame`; of a comprehension without this line, the frame of the function around."""
    while frame.f_code.co_name in _COMPREHENSIONS and not has_line(frame, line):
        if frame.f_back is None:
            break
        frame = frame.f_back
    return frame


def has_line(frame: FrameType, line: int) -> bool:
    """Return whether the function of `frame` has code in this line of its own."""
    return any(number == line for _, _, number in frame.f_code.co_lines())
