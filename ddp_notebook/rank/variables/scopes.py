"""The variables of a rank by scope: those of the function that the main thread is in, global ones.

Called on the thread that answers: nothing here waits, imports, or runs code of the user's.
"""

from __future__ import annotations

import inspect
import json
from types import FrameType
from typing import Any

from ddp_notebook.model import Activity, RankVariables, Scope, codec
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
_MOST = 100
"""The most variables of one scope, the newest ones."""
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
        stack, is_busy = self._stands()
        frame, _ = self._user_code.innermost(stack)
        if frame is None:  # a cell with top-level await, which is on no stack
            awaiting = list(stack_frames.task_frames(self._main_thread.task))
            frame, _ = self._user_code.innermost(awaiting[::-1])
        busy = is_busy and frame is not None

        users, hidden = self._names.get(), self._names.hidden
        names = users if frame is None else frame.f_globals
        function = file = ""
        if frame is not None:
            function = frame.f_code.co_qualname.rpartition(".<locals>.")[2][-LONGEST_NAME:]
            name = frame.f_code.co_filename
            cell = stack_frames.CELL_NAME.fullmatch(name)
            file = f"cell {cell[1]}" if cell else name.rpartition("/")[2][-LONGEST_NAME:]
        groups: list[tuple[str, str, list[tuple[str, Any]]]] = []
        if frame is not None and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            traced = any(f.f_globals.get("__name__") == "bdb" for f in stack)
            groups.append((function, file, values_of(frame, keep=traced)))
        # What the user has bound: what `%who` would list.
        unbound = object()
        own = [
            (name, value)
            for name, value in list(names.items())
            if name not in _IPYTHONS and value is not hidden.get(name, unbound)
        ]
        groups.append(("", "" if names is users else file, own))

        reader, digester = TensorReader(values=not busy), Digester(objects=False)
        left = MOST_BYTES - 500  # for what is around the variables
        scopes = []
        for function, file, found in groups:
            wanted = [
                (name, value)
                for name, value in found
                if type(name) is str
                and name[:1] != "_"
                and not issubclass(type(value), NOT_SHOWN)  # a definition, or an import
                and name in (request.names or (name,))
            ]
            # The newest ones: what a cell has just bound is what the user asks for. They share one
            # reader and one digester, so that their time is that of the whole answer.
            kept = []
            for name, value in wanted[-_MOST:]:
                variable = describe(name[:LONGEST_NAME], value, reader, None if busy else digester)
                left -= len(json.dumps(codec.encode(variable))) + 2
                if left < 0:
                    break
                kept.append(variable)
            scopes.append(Scope(function, file, tuple(kept), len(wanted) - len(kept)))
        return RankVariables(self._rank, tuple(scopes), busy)

    def standing(self) -> tuple[list[tuple[FrameType, int]], bool]:
        """The user's frames where the rank is, the innermost first; whether it computes there.

        Of a rank that does nothing and has raised: those that the error has left.
        """
        stack, busy = self._stands()
        is_users = self._user_code.is_users
        own = [(f, f.f_lineno) for f in stack if is_users(f.f_code.co_filename)]
        error = self._main_thread.error
        if not own and error is not None:
            return stack_frames.raised_in(error.trace, is_users), False
        return own, busy

    def _stands(self) -> tuple[list[FrameType], bool]:
        """The main thread's stack, and whether it computes."""
        awaited = self._waiting.awaited()
        inside = self._waiting.wait(awaited, is_runnable()).inside
        return awaited.stack, self._waiting.activity(inside) is Activity.BUSY
