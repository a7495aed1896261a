"""The variables of a rank by scope: those of the function that the main thread is in, global ones.

Called on the thread that answers: nothing here waits, imports, or runs code of the user's.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import FrameType
from typing import Any

from ddp_notebook.model import Activity, RankVariables, Scope, Variable, codec
from ddp_notebook.rank.calls import VariablesRequest
from ddp_notebook.rank.inspect import frames as stack_frames
from ddp_notebook.rank.inspect.frames import UserCode
from ddp_notebook.rank.inspect.process import is_runnable
from ddp_notebook.rank.inspect.stacks import LONGEST_NAME, NOT_SHOWN, values_of
from ddp_notebook.rank.inspect.waiting import Waiting
from ddp_notebook.rank.main_thread import MainThread
from ddp_notebook.rank.rank_process import RankProcess
from ddp_notebook.rank.variables.described import describe
from ddp_notebook.rank.variables.digests import Digester
from ddp_notebook.rank.variables.global_names import GlobalNames
from ddp_notebook.rank.variables.tensors import TensorReader

MOST_BYTES = 60_000
"""The largest answer of a rank, as JSON."""
MOST_VARIABLES = 100
"""The most variables of one scope, the newest ones."""
_ASIDE = 500
_IPYTHONS = {"In", "Out", "exit", "quit", "get_ipython"}


class Variables:
    """Reads this rank's variables while its main thread continues."""

    def __init__(
        self,
        process: RankProcess,
        waiting: Waiting,
        main_thread: MainThread,
        user_code: UserCode,
        names: GlobalNames,
    ) -> None:
        self._rank = process.rank
        self._waiting = waiting
        self._user_code = user_code
        self._main_thread = main_thread
        self._names = names

    def variables(self, request: VariablesRequest) -> RankVariables:
        """This rank's variables, in at most `MOST_BYTES` as JSON."""
        awaited = self._waiting.awaited()
        stack = awaited.stack
        inside = self._waiting.wait(awaited, is_runnable()).inside
        frame = self._innermost(stack)
        busy = self._waiting.activity(inside) is Activity.BUSY and frame is not None
        digester = None if busy else Digester(objects=False)
        tell = partial(describe, reader=TensorReader(values=not busy), digester=digester)
        room = _Room()
        scopes = []
        if frame is not None and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            traced = any(f.f_globals.get("__name__") == "bdb" for f in stack)
            local = [each for each in values_of(frame, keep=traced) if _is_shown(*each)]
            scopes.append(self._scope(_function(frame), _file(frame), local, request, tell, room))
        users = self._names.get()
        names = frame.f_globals if frame is not None else users
        file = "" if names is users or frame is None else _file(frame)
        scopes.append(self._scope("", file, self._global(names), request, tell, room))
        return RankVariables(self._rank, tuple(scopes), busy)

    def standing(self) -> tuple[list[tuple[FrameType, int]], bool]:
        """The user's frames where the rank is, the innermost first; whether it computes there.

        Of a rank that does nothing and has raised: those that the error has left.
        """
        awaited = self._waiting.awaited()
        inside = self._waiting.wait(awaited, is_runnable()).inside
        busy = self._waiting.activity(inside) is Activity.BUSY
        is_users = self._user_code.is_users
        stack = [(f, f.f_lineno) for f in awaited.stack if is_users(f.f_code.co_filename)]
        error = self._main_thread.error
        if not stack and error is not None:
            return stack_frames.raised_in(error.trace, is_users), False
        return stack, busy

    def _innermost(self, stack: list[FrameType]) -> FrameType | None:
        """The user's innermost frame; None when none of the user's code runs."""
        frame, _ = self._user_code.innermost(stack)
        if frame is None:
            awaiting = list(stack_frames.task_frames(self._main_thread.task))
            frame, _ = self._user_code.innermost(awaiting[::-1])
        return frame

    def _global(self, names: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """What the user has bound, but imports and definitions: what `%who` would list."""
        hidden = self._names.hidden
        return [
            (name, value)
            for name, value in list(names.items())
            if _is_shown(name, value)
            and name not in _IPYTHONS
            and value is not hidden.get(name, _NONE)
        ]

    @staticmethod
    def _scope(
        function: str,
        file: str,
        values: list[tuple[str, Any]],
        request: VariablesRequest,
        tell: Callable[[str, Any], Variable],
        room: _Room,
    ) -> Scope:
        if request.names:
            values = [each for each in values if each[0] in request.names]
        newest = values[-MOST_VARIABLES:]
        kept = room.take(tell(name[:LONGEST_NAME], value) for name, value in newest)
        return Scope(function, file, kept, len(values) - len(kept))


_NONE = object()


class _Room:
    """The bytes that are left in the answer."""

    def __init__(self) -> None:
        self._left = MOST_BYTES - _ASIDE

    def take(self, variables: Iterable[Variable]) -> tuple[Variable, ...]:
        """The first variables, as many as there is room for."""
        kept = []
        for variable in variables:
            self._left -= len(json.dumps(codec.encode(variable))) + 2
            if self._left < 0:
                break
            kept.append(variable)
        return tuple(kept)


def _is_shown(name: str, value: Any) -> bool:
    """True for a variable: no definition, import or name of Python's or IPython's own."""
    return type(name) is str and name[:1] != "_" and not issubclass(type(value), NOT_SHOWN)


def _function(frame: FrameType) -> str:
    return frame.f_code.co_qualname.rpartition(".<locals>.")[2][-LONGEST_NAME:]


def _file(frame: FrameType) -> str:
    """The file that the frame's code is in, or ``cell 3``."""
    name = frame.f_code.co_filename
    cell = stack_frames.CELL_NAME.fullmatch(name)
    return f"cell {cell[1]}" if cell else name.rpartition("/")[2][-LONGEST_NAME:]
