"""The main thread's stack for `%ddp_where`: from the user's first frame down into torch.

Called on the thread that answers: nothing here waits, imports, or runs code of the user's.
"""

from __future__ import annotations

import inspect
import json
import linecache
import sys
import traceback
import types
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

from ddp_notebook.model import Activity, Doing, Frame, Local, RankStack, codec
from ddp_notebook.rank.calls import StackRequest
from ddp_notebook.rank.inspect import frames as stack_frames
from ddp_notebook.rank.inspect import safe_repr
from ddp_notebook.rank.inspect.frames import OURS, UserCode
from ddp_notebook.rank.inspect.process import is_runnable
from ddp_notebook.rank.inspect.waiting import Awaited, Waiting
from ddp_notebook.rank.main_thread import Failure, MainThread
from ddp_notebook.rank.rank_process import RankProcess

MOST_BYTES = 16_000
"""The most bytes of a rank's answer, as JSON."""
_HALF = 15
_MOST_FRAMES = 2 * _HALF
_MOST_LOCALS = 24
_LONGEST_SOURCE = 100
LONGEST_NAME = 60
NOT_SHOWN = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType)
"""Types of most names in a module: imports and definitions."""


class Stacks:
    """Makes this rank's stack while its main thread runs."""

    def __init__(
        self,
        process: RankProcess,
        main_thread: MainThread,
        waiting: Waiting,
        user_code: UserCode,
    ) -> None:
        self._rank = process.rank
        self._main_thread = main_thread
        self._waiting = waiting
        self._user_code = user_code

    def stack(self, request: StackRequest) -> RankStack:
        """This rank's stack, of at most `MOST_BYTES` as JSON."""
        awaited = self._waiting.awaited()
        stack = awaited.stack
        shown, left_out, operation = self._shown(stack)
        # The main thread runs: first its lines, then its variables, and only then the files.
        lines = [frame.f_lineno for frame in shown]
        values: list[tuple[Local, ...]] = [()] * len(shown)
        if request.with_locals:
            traced = "bdb" in map(_module, stack)
            values = [
                variables_of(frame, keep=traced) if self._is_told(frame) else () for frame in shown
            ]
        frames = [self._frame(frame, line) for frame, line in zip(shown, lines, strict=True)]
        if left_out:
            frames.insert(_HALF, Frame("", 0, "", f"{left_out:,} frames left out"))
            values.insert(_HALF, ())
        doing = self._doing(awaited, operation, bool(frames))
        error = self._main_thread.error
        at_error = (Activity.FAILED,) if frames else (Activity.FAILED, Activity.HELD)
        if error is not None and doing.activity in at_error:
            frames, values = self._left_by(error, request.with_locals)
        return RankStack(self._rank, doing, _fit(frames, values))

    def _left_by(
        self, error: Failure, with_locals: bool
    ) -> tuple[list[Frame], list[tuple[Local, ...]]]:
        """Return the frames that an error passed through, and the variables in the user's.

        Frames of libraries are among them, which the cell leaves out. Of an error that this one
        wraps, or of a worker, the user's lines come last, without variables.
        """
        is_users = self._user_code.is_users
        places = stack_frames.raised_in(error.trace, is_users)
        walk = [*traceback.walk_tb(error.trace)] if places else []
        begins = walk.index(places[-1]) if places else 0
        passed = [
            (frame, line)
            for frame, line in walk[begins:]
            if is_users(frame.f_code.co_filename) or not frame.f_code.co_filename.startswith(OURS)
        ]
        passed = [*passed[:_HALF], *passed[_HALF:][-_HALF:]]
        inner = error.frames[len(places) :]
        values = [
            variables_of(frame, keep=True) if with_locals and self._is_told(frame) else ()
            for frame, _ in passed
        ]
        return [*(self._frame(*place) for place in passed), *inner], [*values, *((),) * len(inner)]

    def _doing(self, awaited: Awaited, operation: str, runs: bool) -> Doing:
        """Return the main thread's activity; `runs` is true if it has frames to show."""
        inside = self._waiting.wait(awaited, is_runnable()).inside
        activity = self._waiting.activity(inside)
        text = self._main_thread.doing
        if activity in (Activity.IDLE, Activity.FAILED) and runs:
            activity = Activity.BUSY
        if activity is Activity.HELD:
            text = self._main_thread.paused_before
        elif activity is Activity.FAILED and (error := self._main_thread.error) is not None:
            first = error.text.strip().splitlines()[:1]
            text = ": ".join((error.type, *first))
        if activity is Activity.WAITING:
            text = text.removeprefix(f"{inside}: ")
            operation = operation or inside
        return Doing(activity, operation, text[:300])

    def _shown(self, stack: list[FrameType]) -> tuple[list[FrameType], int, str]:
        """Return the frames to show, how many in their middle are left out, and torch's call.

        `stack` is the main thread's, innermost first; those to show are outermost first. A cell
        that awaits something is not on it.
        """
        is_users = self._user_code.is_users
        _, operation = self._user_code.innermost(stack)
        shown = [f for f in stack[::-1] if _module(f).partition(".")[0] == "torch"]
        awaiting = list(stack_frames.task_frames(self._main_thread.task))
        for frames, call in ((stack[::-1], operation), (awaiting, "await")):
            users = (i for i, frame in enumerate(frames) if is_users(frame.f_code.co_filename))
            if (first := next(users, None)) is not None:
                shown, operation = frames[first:], call
                break
        left_out = max(0, len(shown) - _MOST_FRAMES)
        return [*shown[:_HALF], *shown[_HALF + left_out :]], left_out, operation

    def _frame(self, frame: FrameType, at: int | None) -> Frame:
        code = frame.f_code
        name = code.co_filename
        line = at or 0
        if not name.startswith("<"):
            linecache.checkcache(name)  # it may have been edited since it was last shown
        source = linecache.getline(name, line).strip()
        if len(source) > _LONGEST_SOURCE:
            source = f"{source[: _LONGEST_SOURCE - 1]}…"
        return Frame(
            file=stack_frames.file_shown(name)[-160:],
            line=line,
            function=stack_frames.own_name(code)[-LONGEST_NAME:],
            source=source,
            module=_module(frame)[:LONGEST_NAME],
            library=not self._is_told(frame),
        )

    def _is_told(self, frame: FrameType) -> bool:
        """True for the user's frames, and for that of a library in which the rank is paused."""
        told = self._user_code.is_users(frame.f_code.co_filename)
        return told or frame is self._main_thread.paused_in


def variables_of(frame: FrameType, *, keep: bool) -> tuple[Local, ...]:
    """The variables of a frame, as short texts; `keep` when a debugger holds it."""
    variables = values_of(frame, keep=keep)
    shown = [
        Local(name[:LONGEST_NAME], safe_repr.of(value)) for name, value in variables[:_MOST_LOCALS]
    ]
    if len(variables) > _MOST_LOCALS:
        shown.append(Local("…", f"{len(variables) - _MOST_LOCALS} more"))
    return tuple(shown)


def values_of(frame: FrameType, *, keep: bool) -> list[tuple[str, Any]]:
    """Return the variables of a frame, in order; `keep` when a debugger holds it.

    Of a cell or a module: the names that its code uses, without imports and definitions.
    """
    code, names = frame.f_code, frame.f_locals
    if not code.co_flags & inspect.CO_OPTIMIZED:
        if type(names) is not dict:
            return []  # the body of a class whose namespace is the user's own invention
        used = ((name, names.get(name, sys)) for name in code.co_names if name[:1] != "_")
        return [(name, value) for name, value in used if not issubclass(type(value), NOT_SHOWN)]
    order = dict.fromkeys((*code.co_varnames, *code.co_cellvars, *code.co_freevars))
    found = [(name, names[name]) for name in order if name in names and name[:2] != "__"]
    # Before Python 3.13 a frame keeps the dict that it was asked for, and with it what the function
    # deletes. So it is emptied: unless a debugger may write it back, and unless the function has
    # called `locals()`, which gives the same dict. The reference count is that of a dict that only
    # its frame and the function that looks at it have.
    keep |= frame.f_trace is not None
    if not keep and type(names) is dict and sys.getrefcount(names) <= 3:
        names.clear()
    return found


def _module(frame: FrameType) -> str:
    name = frame.f_globals.get("__name__")
    return name if type(name) is str else ""


# -- size ------------------------------------------------------------------------------


def _fit(frames: Sequence[Frame], values: Sequence[Sequence[Local]]) -> tuple[Frame, ...]:
    """The frames with as many of their variables as fit, the innermost first."""
    fitting = list(frames)
    # Bytes for what stands beside the frames, beside the locals of each, and around a local.
    allowed = MOST_BYTES - 1000 - 70 * len(frames)
    for number, frame in enumerate(frames):
        if _size(fitting) <= allowed:
            break
        fitting[number] = replace(frame, source="")
    room = allowed - _size(fitting)
    for number in range(len(fitting) - 1, -1, -1):
        kept: list[Local] = []
        for local in values[number]:
            room -= len(json.dumps([local.name, local.text])) + 24
            if room < 0:
                kept.append(Local("…", f"{len(values[number]) - len(kept)} left out"))
                break
            kept.append(local)
        fitting[number] = replace(fitting[number], locals=tuple(kept))
    return tuple(fitting)


def _size(frames: Sequence[Frame]) -> int:
    stack = RankStack(0, Doing(Activity.IDLE), tuple(frames))
    return len(json.dumps(codec.encode(stack)))
