"""Frames told apart and described in words a user knows: ``all_reduce (cell 4, line 7)``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

IsUsers = Callable[[str], bool]
"""Return True when a file is the user's."""
CELL_NAME = re.compile(r"<ddp cell (\d+)>")
"""File name of a cell's code on every rank; the number is the notebook's ``In [n]``."""

_MOST_KNOWN = 4096
"""File names for which the answer of `is_users` is remembered."""
OURS = f"{Path(__file__).parents[2]}{os.sep}"
"""How the names of this package's files begin."""
_LIBRARY = (
    "/site-packages/",
    "/dist-packages/",
    "/torchinductor_",  # what torch.compile has written
    f"{Path(os.__file__).parent}{os.sep}",
    OURS,
)
_WRAPPER = "__tracebackhide__"
"""A variable of ours in functions that stand in for torch's, and call them."""
_OBSERVING = tuple(
    str(Path(__file__).parents[1] / name)
    for name in (
        "collectives/observer.py",
        "collectives/pause.py",
        "collectives/guard.py",
        "collectives/works.py",
        "debugger/not_finite.py",
        "training/hooks.py",
        "inspect/store_keys.py",
        "setup/own_stores.py",
        "debugger/debugger.py",
        "debugger/lines.py",
        "debugger/tracing.py",
        "debugger/monitoring.py",
        "cells/keyboard.py",
    )
)
"""Files of this package that user code may call unknowingly: left out of stacks."""
WAITING_IN = (
    "all_reduce",
    "all_reduce_coalesced",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "batch_isend_irecv",
    "gather",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "send",
    "send_object_list",
    "new_group",
    "init_process_group",
    "monitored_barrier",
    "destroy_process_group",
)
"""torch's functions in which a rank waits for others."""
STORE_FUNCTIONS = ("_create_c10d_store", "_tcp_rendezvous_handler", "_env_rendezvous_handler")
"""Functions of `torch.distributed.rendezvous` that a rank is in while it connects to the store."""
GROUP_FUNCTIONS = ("_new_process_group_helper", "_store_based_barrier", "new_group")
"""Functions of `torch.distributed.distributed_c10d` that it is in while the ranks connect.

Only looked for on the stack. If torch renames them, a rank in setup is taken for busy.
"""


def cell_file(number: int) -> str:
    """The file name of the cell whose prompt is ``In [number]``."""
    return f"<ddp cell {number}>"


def main_frame() -> FrameType | None:
    """The present innermost frame of the main thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def task_frames(task: asyncio.Task[None] | None) -> Iterator[FrameType]:
    """The frames of a waiting task, outermost first."""
    awaited: Any = task.get_coro() if task is not None and not task.done() else None
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        yield frame
        awaited = awaited.cr_await


def chain(frame: FrameType | None) -> Iterator[FrameType]:
    """A thread's frames, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def frames_of(frame: FrameType | None) -> list[FrameType]:
    """A thread's frames, innermost first, without those that observe a collective."""
    return [outer for outer in chain(frame) if outer.f_code.co_filename not in _OBSERVING]


def raised_in(trace: TracebackType | None, is_users: IsUsers) -> list[tuple[FrameType, int]]:
    """Return the user's frames in an error's traceback with their lines, the innermost first."""
    lines = dict(traceback.walk_tb(trace))
    users = [(f, line) for f, line in lines.items() if is_users(f.f_code.co_filename)]
    return users[::-1]


def raised_by_handler(error: BaseException) -> bool:
    """Return whether a handler of a signal raised it, at whatever line the main thread was.

    torch's handler raises where a DataLoader's worker has died: that is the user's error, also
    where it came while code of ours ran.
    """
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    codes = {code for each in handlers if (code := getattr(each, "__code__", None)) is not None}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def file_shown(filename: str) -> str:
    """Return a file as it is shown: ``cell 3``, or its path."""
    cell = CELL_NAME.fullmatch(filename)
    return f"cell {cell[1]}" if cell else filename


def own_name(code: CodeType) -> str:
    """Return a function's name with its class, and without the functions that it is defined in."""
    return code.co_qualname.rpartition(".<locals>.")[2]


def _line_of(frame: FrameType) -> str:
    filename = frame.f_code.co_filename
    file = file_shown(filename) if CELL_NAME.fullmatch(filename) else filename.rpartition("/")[2]
    return f"{file}, line {frame.f_lineno}"


class UserCode:
    """Distinguishes the user's code from libraries, and describes frames by the user's lines."""

    def __init__(self) -> None:
        self._scripts: set[str] = set()
        """Files that were run as scripts: the user's even in a folder of libraries."""
        self._known: dict[str, bool] = {}
        """Answers of `is_users`: it is asked for each asynchronous collective."""
        self._installed: dict[str, bool] = {}
        """Of folders from which Python imports: whether libraries are installed there."""

    def add_script(self, filename: str) -> None:
        """Treat `filename` as the user's, in whatever folder it is."""
        self._scripts.add(filename)
        self._known.clear()
        self._installed.clear()

    def is_users(self, filename: str) -> bool:
        """True for cells and for files that are not part of Python or an installed library."""
        known = self._known.get(filename)
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            library = (
                filename.startswith("<")
                or any(part in filename for part in _LIBRARY)
                or any(filename.startswith(folder) for folder in self._folders())
            )
            known = bool(CELL_NAME.fullmatch(filename)) or filename in self._scripts or not library
            self._known[filename] = known
        return known

    def _folders(self) -> Iterator[str]:
        """Yield folders of installed libraries that are called otherwise, as by ``pip --target``.

        The installer has left what it knows of each library in such a folder. The working folder
        and that of a script are the user's, whatever was installed there.
        """
        for entry in filter(None, sys.path):
            folder = f"{entry.rstrip(os.sep)}{os.sep}"
            if entry not in self._installed:
                with contextlib.suppress(OSError):
                    own = (*self._scripts, f"{Path.cwd()}{os.sep}")
                    has = not any(path.startswith(folder) for path in own)
                    has = has and next(Path(entry).glob("*.dist-info"), None) is not None
                    self._installed[entry] = has
            if self._installed.get(entry):
                yield folder

    def has_called(self, frame: FrameType) -> bool:
        """Return whether the user's code runs `frame`: not Jupyter's threads, not code of ours."""
        outermost = frame
        for outermost in chain(frame):
            code = outermost.f_code
            ours = code.co_filename.startswith(OURS)
            if self.is_users(code.co_filename) or (ours and _WRAPPER not in code.co_varnames):
                return not ours
        # Python has not started autograd's own threads.
        return outermost.f_code.co_filename != threading.__file__

    def describe_task(self, task: asyncio.Task[None] | None) -> str:
        """Where a cell with top-level `await` waits: it is not on the main thread's stack."""
        text = ""
        for frame in task_frames(task):
            if self.is_users(frame.f_code.co_filename):
                text = f"await ({_line_of(frame)})"
        return text

    def describe(self, frame: FrameType | None, *, any_call: bool = False) -> str:
        """Return the innermost user frame, and the torch call it is in.

        With `any_call` also one of another library: ``Queue.get (train.py, line 40)``.
        """
        stack = frames_of(frame)
        user, operation = self.innermost(stack)
        if user is None:
            return ""
        if any_call and not operation and stack[0] is not user:
            inner = stack[stack.index(user) - 1]
            of = f"{type(inner.f_locals['self']).__name__}." if "self" in inner.f_locals else ""
            operation = f"{of}{inner.f_code.co_name}"
        line = _line_of(user)
        return f"{operation} ({line})" if operation else line

    def innermost(self, frames: Iterable[FrameType]) -> tuple[FrameType | None, str]:
        """The user's innermost frame, if any, and the call of torch that it is in.

        `frames` are a thread's, innermost first.
        """
        operation = ""
        for frame in frames:
            code = frame.f_code
            module = frame.f_globals.get("__name__", "")
            if module.startswith("torch.distributed") and code.co_name in WAITING_IN:
                operation = code.co_name
            elif module == "torch.autograd" and code.co_name == "backward":
                operation = operation or "backward"
            elif module.startswith("torch.nn.parallel.distributed") and code.co_name == "__init__":
                operation = "DDP()"
            if self.is_users(code.co_filename):
                return frame, operation
        return None, operation


def code_in(code: CodeType) -> Iterator[CodeType]:
    """The code, and that of all functions and classes in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_in(constant)


def globals_for(code: CodeType, frame: FrameType) -> dict[str, Any]:
    """The global names of `code`, an expression or statement that is evaluated in `frame`.

    Its lambdas and comprehensions look up names there alone, so the frame's own are among them.
    """
    own: Mapping[str, Any] = frame.f_locals
    nests = own is not frame.f_globals and any(isinstance(c, CodeType) for c in code.co_consts)
    return {**frame.f_globals, **own} if nests else frame.f_globals
