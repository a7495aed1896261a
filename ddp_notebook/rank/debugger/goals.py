"""How far a step goes: to the next line, into a call, out of the function, to a line."""

from __future__ import annotations

import inspect
from types import FrameType

from ddp_notebook.rank.calls import How
from ddp_notebook.rank.inspect.frames import IsUsers

_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
"""Functions of their own before Python 3.12, and no more to who steps."""
_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Goal:
    """Where a thread that continues from `frame` is to stop; hears of its lines and returns."""

    def __init__(self, how: How, frame: FrameType, line: int, is_users: IsUsers) -> None:
        self.into = how is How.INTO
        self._line = line if how is How.LINE else 0
        frame = with_line(frame, line) if self._line else frame
        self._start = frame
        self.is_users = is_users
        self.frames: set[FrameType] = set()
        """The frames whose next line may be the goal."""
        if how is How.OUT:
            self._add_caller(frame)
        else:
            self.frames.add(frame)

    def reached(self, frame: FrameType) -> bool:
        """Whether the thread stops at the line that `frame` is about to run."""
        if self.into and self.is_users(frame.f_code.co_filename):
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
        caller = frame.f_back
        while caller is not None and not self.is_users(caller.f_code.co_filename):
            caller = caller.f_back
        if caller is not None:
            self.frames.add(caller)


def can_be_suspended(frame: FrameType) -> bool:
    """True for a generator's or a coroutine's frame, which is left by `yield` and `await` too."""
    return bool(frame.f_code.co_flags & _SUSPENDED)


def with_line(frame: FrameType, line: int) -> FrameType:
    """`frame`; that of the function around it, where it is a comprehension without this line."""
    while frame.f_code.co_name in _COMPREHENSIONS and not has_line(frame, line):
        if frame.f_back is None:
            break
        frame = frame.f_back
    return frame


def has_line(frame: FrameType, line: int) -> bool:
    """Whether the function of `frame` has code in this line of its own."""
    return any(number == line for _, _, number in frame.f_code.co_lines())
