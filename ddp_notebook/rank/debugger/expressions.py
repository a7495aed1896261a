"""Evaluates and assigns in the frames of a rank: paused at a line, waiting in torch, or idle.

So it does in the frames that an error has left, until something runs again.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import re
import sys
import threading
import weakref
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, TypeVar

import torch

from ddp_notebook.model import Frame, RankVariables, Scope, Variable
from ddp_notebook.rank.calls import (
    Checksums,
    Evaluated,
    Expression,
    Nothing,
    Part,
    Standing,
)
from ddp_notebook.rank.debugger.breakpoints import lines_of
from ddp_notebook.rank.debugger.collective_calls import issued_by
from ddp_notebook.rank.debugger.debugger import Debugger, Places, Stop
from ddp_notebook.rank.inspect.frames import CELL_NAME, globals_for
from ddp_notebook.rank.inspect.safe_repr import TENSORS
from ddp_notebook.rank.variables.described import describe
from ddp_notebook.rank.variables.digests import Digester
from ddp_notebook.rank.variables.global_names import GlobalNames
from ddp_notebook.rank.variables.scopes import Variables
from ddp_notebook.rank.variables.tensors import TensorReader, checksums, values

_WITHIN_S = 1.5
_LONGEST = 2000
"""Characters of a value's own `repr`."""
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")
_MOST_FRAMES = 60
_MOST_KEPT = 2**18
"""Values of a tensor."""
_BUSY = "it runs and is not paused, so its variables change meanwhile. Stop it: %ddp_break LINE"


T = TypeVar("T")


@dataclass(frozen=True)
class _Where:
    """Where the rank is: at a stop, in frames of the user's, or nowhere in particular."""

    stop: Stop | None
    places: Places
    busy: bool = False
    """Nothing can be asked: it computes."""


class Expressions:
    """Answers in the thread that is paused; where none is, in one that is made for it."""

    def __init__(
        self, rank: int, debugger: Debugger, variables: Variables, names: GlobalNames
    ) -> None:
        self._rank = rank
        self._debugger = debugger
        self._variables = variables
        self._names = names
        self._last: weakref.ref[torch.Tensor] | None = None
        """The last evaluated tensor, as long as it is referenced."""
        self._kept: torch.Tensor | None = None

    def evaluate(self, wanted: Expression) -> Evaluated:
        """The value, or why there is none. Any thread."""
        where = self._where()
        if where.busy:
            return Evaluated(problem=_BUSY)
        try:
            refused = self._refused(wanted, where)
            if refused:
                return Evaluated(problem=refused)
            if where.stop is None:
                return _in_a_thread(lambda: self._aside(wanted, where.places))
            return where.stop.ask(lambda: self._guarded(wanted, where.places), _WITHIN_S)
        except TimeoutError:
            return Evaluated(
                problem=f"it did not answer within {_WITHIN_S:g} s and still evaluates, as a "
                "collective does that other ranks have not called. Free it: %ddp_abort"
            )

    def standing(self, _: Nothing) -> Standing:
        """The user's frames where the rank is, the innermost first. Any thread."""
        where = self._where()
        places = where.places[:_MOST_FRAMES]
        return Standing(tuple(_shown(*place) for place in places), where.busy)

    def checksums(self, part: Part) -> Checksums:
        """What tells where in a tensor ranks differ. Any thread."""
        tensor = self._last() if self._last is not None else None
        if tensor is None:
            return Checksums()
        of, step = checksums(tensor, part.begin, part.end)
        return Checksums(of, step, values(tensor, part.begin, part.end))

    def _where(self) -> _Where:
        stop = self._debugger.stopped
        if stop is not None:
            return _Where(stop, self._debugger.places(stop))
        places, busy = self._variables.standing()
        return _Where(None, places, busy and bool(places))

    def _refused(self, wanted: Expression, where: _Where) -> str:
        """Why it is not evaluated: it would wait for ranks that do not evaluate it."""
        if where.stop is not None and wanted.everywhere:
            return ""
        frame = _frame(where.places, wanted.up)
        own = self._names.get()
        scopes = [frame.f_locals, frame.f_globals, own] if frame is not None else [own]
        issued = issued_by(wanted.source, scopes)
        if not issued:
            return ""
        return (
            f"not evaluated: it may issue a collective ({issued}), which ends only when every rank "
            "of its group calls it. Do that in a %%ddp cell, or with all ranks paused at lines"
        )

    def _aside(self, wanted: Expression, places: Places) -> Evaluated:
        with self._debugger.aside():
            return self._guarded(wanted, places)

    def _guarded(self, wanted: Expression, places: Places) -> Evaluated:
        """The value in one of these frames, the innermost first; without any, in a cell's."""
        if wanted.up and wanted.up >= len(places):
            known = f"{len(places) or 'no'} frame{'s' * (len(places) != 1)} of yours"
            return Evaluated(problem=f"it has {known}, none {wanted.up} up. Show them: %ddp_frame")
        frame = _frame(places, wanted.up)
        try:
            return (
                self._assign(wanted.source, frame) if wanted.assign else self._value(wanted, frame)
            )
        except KeyboardInterrupt:  # of the user, who ends what waits here
            raise
        except SystemExit:
            ends = "the cell: %ddp_abort, the ranks: %ddp_shutdown"
            return Evaluated(problem=f"raised SystemExit, which ends nothing here. To end {ends}")
        except BaseException as error:  # noqa: BLE001  # the user's expression
            return Evaluated(problem=f"raised {_name(error)}"[:500])

    def _value(self, wanted: Expression, frame: FrameType | None) -> Evaluated:
        own: Any = self._names.get()
        code = compile(wanted.source, "<expression>", "eval")
        names = (own,) if frame is None else (globals_for(code, frame), frame.f_locals)
        value = eval(code, *names)  # noqa: S307
        if wanted.own_text:
            text = _ADDRESS.sub("at 0x…", repr(value))  # no two processes have the same
            digest = f"{zlib.crc32(text.encode('utf-8', 'replace')):08x}"
            variable = Variable(wanted.source, text[:_LONGEST], digest=digest)
        else:
            digester = Digester(objects=True)
            variable = describe(wanted.source, value, TensorReader(full=True), digester)
            known = variable.digest and not digester.opaque
            if not (known or variable.tensor or variable.number is not None):
                variable = replace(variable, text=f"{variable.text}, not compared to its end")
            self._keep(value)
        return Evaluated(RankVariables(self._rank, (Scope("", "", (variable,)),)))

    def _keep(self, value: Any) -> None:
        """A tensor may be queried again; a small one without other references is kept for that.

        Without what it was computed from, which may be large.
        """
        self._last = self._kept = None
        numpy = sys.modules.get("numpy")
        if numpy is not None and type(value) is getattr(numpy, "ndarray", None):
            with contextlib.suppress(TypeError, ValueError):  # of texts, or read backwards
                self._kept = torch.from_numpy(value)
                self._last = weakref.ref(self._kept)
        if type(value) in TENSORS:
            if value.numel() <= _MOST_KEPT:
                self._kept = value = value.detach()
            self._last = weakref.ref(value)

    def _assign(self, source: str, frame: FrameType | None) -> Evaluated:
        code = compile(source, "<assignment>", "exec")
        own: Any = self._names.get()
        if frame is None:
            exec(code, own)  # noqa: S102
            return Evaluated()
        inner = frame.f_locals
        names = dict(inner)
        exec(code, globals_for(code, frame), names)  # noqa: S102
        new = [name for name in names if names[name] is not inner.get(name, names)]
        changed = [name for name in new if name != "__annotations__"]  # made by `x: int = 3`
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


def _frame(places: Places, up: int) -> FrameType | None:
    return places[up][0] if up < len(places) else None


def _name(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  # the user's own __str__
        return type(error).__name__


def _in_a_thread(compute: Callable[[], T]) -> T:
    """What `compute` gives: who asks must be able to ask again when it never ends."""
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(compute())
        except BaseException as error:  # noqa: BLE001  # it is the user's
            answer.set_exception(RuntimeError(_name(error)))  # the thread that waits is ours

    threading.Thread(target=work, name="ddp-expression", daemon=True).start()
    return answer.result(_WITHIN_S)


def _shown(frame: FrameType, line: int) -> Frame:
    code = frame.f_code
    cell = CELL_NAME.fullmatch(code.co_filename)
    lines = lines_of(code.co_filename)
    source = lines[line - 1].strip()[:160] if 0 < line <= len(lines) else ""
    file = f"cell {cell[1]}" if cell else code.co_filename
    return Frame(file, line, code.co_qualname.rpartition(".<locals>.")[2], source)
