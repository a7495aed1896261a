"""Evaluates and assigns in the frames of a rank that stands at a line, in torch, or idle."""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from ddp_notebook.model import RankVariables, Scope
from ddp_notebook.rank.calls import Evaluated, Expression
from ddp_notebook.rank.debugger.debugger import Debugger
from ddp_notebook.rank.variables.described import describe
from ddp_notebook.rank.variables.global_names import GlobalNames
from ddp_notebook.rank.variables.scopes import Variables
from ddp_notebook.rank.variables.tensors import TensorReader

_WITHIN_S = 1.5
_BUSY = "it runs and is not paused, so its variables change meanwhile. Stop it: %ddp_break LINE"


class Expressions:
    """Answers in the thread that is paused; where none is, in the thread that asks."""

    def __init__(
        self, rank: int, debugger: Debugger, variables: Variables, names: GlobalNames
    ) -> None:
        self._rank = rank
        self._debugger = debugger
        self._variables = variables
        self._names = names

    def evaluate(self, wanted: Expression) -> Evaluated:
        """The value, or why there is none. Any thread."""
        stop = self._debugger.stopped
        if stop is None:
            stack, busy = self._variables.standing()
            if busy and stack:
                return Evaluated(problem=_BUSY)
            return self._guarded(wanted, stack)
        users = self._debugger.users_frames(stop.frame)
        try:
            return stop.ask(lambda: self._guarded(wanted, users), _WITHIN_S)
        except TimeoutError:
            return Evaluated(
                problem=f"it did not answer within {_WITHIN_S:g} s and still evaluates, as a "
                "collective does that other ranks have not called. Free it: %ddp_abort"
            )

    def _guarded(self, wanted: Expression, stack: list[FrameType]) -> Evaluated:
        """The value in one of these frames, the innermost first; without any, in a cell's."""
        if wanted.up and wanted.up >= len(stack):
            return Evaluated(problem=f"it has {len(stack)} frames of yours, none {wanted.up} up")
        frame = stack[wanted.up] if stack else None
        compute = self._assign if wanted.assign else self._value
        try:
            return compute(wanted.source, frame)
        except Exception as error:  # noqa: BLE001  # the user's expression
            return Evaluated(problem=f"raised {type(error).__name__}: {error}"[:500])

    def _value(self, source: str, frame: FrameType | None) -> Evaluated:
        own: Any = self._names.get()
        if frame is None:
            value = eval(compile(source, "<expression>", "eval"), own)  # noqa: S307
        else:
            code = compile(source, "<expression>", "eval")
            value = eval(code, frame.f_globals, frame.f_locals)  # noqa: S307
        variable = describe(source, value, TensorReader())
        return Evaluated(RankVariables(self._rank, (Scope("", "", (variable,)),)))

    def _assign(self, source: str, frame: FrameType | None) -> Evaluated:
        code = compile(source, "<assignment>", "exec")
        own: Any = self._names.get()
        if frame is None:
            exec(code, own)  # noqa: S102
            return Evaluated()
        inner = frame.f_locals
        names = dict(inner)
        exec(code, frame.f_globals, names)  # noqa: S102
        changed = [name for name in names if names[name] is not inner.get(name, names)]
        for holder, name in [(_holder(frame, name, inner), name) for name in changed]:
            holder[name] = names[name]
        if sys.version_info < (3, 13):
            # Before 3.13 a frame's variables are a copy, which is to be written back.
            write_back: Callable[..., Any] = ctypes.pythonapi.PyFrame_LocalsToFast
            write_back(ctypes.py_object(frame), ctypes.c_int(0))
        return Evaluated()


def _holder(frame: FrameType, name: str, inner: dict[str, Any]) -> dict[str, Any]:
    """Where a function's code looks for `name`: in its own variables, `inner`, or global ones."""
    code = frame.f_code
    own = (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
    if not code.co_flags & inspect.CO_OPTIMIZED or name in own:
        return inner
    if name in frame.f_globals:
        return frame.f_globals
    raise NameError(f"{code.co_name} has no variable {name}, and there is no global one")
