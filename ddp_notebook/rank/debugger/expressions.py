"""Evaluates and assigns in the frames of a rank: paused at a line, waiting in torch, or idle.

So it does in the frames that an error has left, until something runs again.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import dis
import inspect
import re
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook import syntax
from ddp_notebook.model import RankVariables, Scope, Variable
from ddp_notebook.rank.calls import Checksums, Evaluated, Expression, Nothing, Standing, TensorPart
from ddp_notebook.rank.debugger.debugger import Debugger, Places, Stop
from ddp_notebook.rank.debugger.source import shown
from ddp_notebook.rank.inspect.frames import WAITING_IN, code_in, globals_for
from ddp_notebook.rank.inspect.global_names import GlobalNames
from ddp_notebook.rank.inspect.safe_repr import TENSORS, inherits, is_array
from ddp_notebook.rank.inspect.tensor_values import TensorReader, checksums, values
from ddp_notebook.rank.inspect.value_digests import Digester
from ddp_notebook.rank.inspect.variables import Variables, describe

_WITHIN_S = 1.5
_BUSY = "it runs and is not paused, so its variables change meanwhile. Stop it: %ddp_break LINE"


@dataclass(eq=False)
class Expressions:
    """Answers in the thread that is paused; where none is, in one that is made for it."""

    rank: int
    debugger: Debugger
    variables: Variables
    names: GlobalNames

    def __post_init__(self) -> None:
        self._last: weakref.ref[torch.Tensor] | None = None
        """The last evaluated tensor, as long as it is referenced."""
        self._kept: torch.Tensor | None = None

    def evaluate(self, wanted: Expression) -> Evaluated:
        """Return the value, or why there is no value. Any thread."""
        stop, places, busy = self._where()
        if busy:
            return Evaluated(problem=_BUSY)
        frame = places[wanted.up][0] if wanted.up < len(places) else None
        if wanted.up and frame is None:
            known = f"{len(places) or 'no'} frame{'s' * (len(places) != 1)} of yours"
            return Evaluated(problem=f"it has {known}, none {wanted.up} up. Show them: %ddp_frame")
        if not (stop is not None and wanted.everywhere):
            own = self.names.get()
            issued = issued_by(
                wanted.source, [frame.f_locals, frame.f_globals, own] if frame else [own]
            )
            if issued:
                return Evaluated(
                    problem=f"not evaluated: it may issue a collective ({issued}), which ends only "
                    "when every rank of its group calls it. Do that in a %%ddp cell, or with all "
                    "ranks paused at lines"
                )
        try:
            # In the thread that is paused: what it has of its own (autograd's mode, CUDA's device
            # and stream, thread-locals) counts in the expression as in the code around.
            if stop is not None:
                return stop.ask(lambda: self._evaluated(wanted, frame), _WITHIN_S)
            # Else in a thread of its own: who asks must be able to ask again if it never ends.
            answer: Future[Evaluated] = Future()

            def work() -> None:
                try:
                    with self.debugger.aside():
                        answer.set_result(self._evaluated(wanted, frame))
                except BaseException as error:  # noqa: BLE001  # the user's; who waits is ours
                    answer.set_exception(RuntimeError(_in_words(error)))

            threading.Thread(target=work, name="ddp-expression", daemon=True).start()
            return answer.result(_WITHIN_S)
        except TimeoutError:
            return Evaluated(
                problem=f"it did not answer within {_WITHIN_S:g} s and still evaluates, as a "
                "collective does that other ranks have not called. Free it: %ddp_abort"
            )

    def standing(self, nothing: Nothing) -> Standing:
        """The user's frames where the rank is, the innermost first. Any thread."""
        _, places, busy = self._where()
        return Standing(tuple(shown(frame.f_code, line) for frame, line in places[:60]), busy)

    def checksums(self, part: TensorPart) -> Checksums:
        """Return digests that show where in a tensor ranks differ. Any thread."""
        tensor = self._last() if self._last is not None else None
        if tensor is None:
            return Checksums()
        of, step = checksums(tensor, part.begin, part.end)
        return Checksums(of, step, values(tensor, part.begin, part.end))

    def _where(self) -> tuple[Stop | None, Places, bool]:
        """The stop that the rank is at, if any; the user's frames; True while it computes there."""
        stop = self.debugger.stopped
        if stop is not None:
            return stop, self.debugger.places(stop), False
        places, busy = self.variables.standing()
        return None, places, busy and bool(places)

    def _evaluated(self, wanted: Expression, frame: FrameType | None) -> Evaluated:
        """The value in a frame; without one, in a cell's."""
        try:
            if wanted.assign:
                self._assign(wanted.source, frame)
                return Evaluated()
            value = self._value(wanted, frame)
            return Evaluated(RankVariables(self.rank, (Scope("", "", (value,)),)))
        except KeyboardInterrupt:  # of the user, who ends what waits here
            raise
        except SystemExit:
            ends = "the cell: %ddp_abort, the ranks: %ddp_shutdown"
            return Evaluated(problem=f"raised SystemExit, which ends nothing here. To end {ends}")
        except BaseException as error:  # noqa: BLE001  # the user's expression
            return Evaluated(problem=f"raised {_in_words(error)}"[:500])

    def _value(self, wanted: Expression, frame: FrameType | None) -> Variable:
        own: Any = self.names.get()
        code = compile(wanted.source, "<expression>", "eval")
        names = (own,) if frame is None else (globals_for(code, frame), frame.f_locals)
        value = eval(code, *names)  # noqa: S307
        if wanted.own_text:
            # No two processes have the same addresses.
            text = re.sub(r"\bat 0x[0-9a-f]+", "at 0x…", repr(value))
            digest = f"{zlib.crc32(text.encode('utf-8', 'replace')):08x}"
            return Variable(wanted.source, text[:2000], digest=digest)
        digester = Digester(objects=True)
        variable = describe(wanted.source, value, TensorReader(full=True), digester)
        # A tensor may be queried again. A small one is kept for that, without what it was computed
        # from, which may be large; so is the view of an array, to which nothing else refers.
        self._last = self._kept = None
        if is_array(value):
            with contextlib.suppress(TypeError, ValueError):  # of texts, or read backwards
                self._kept = torch.from_numpy(value)
                self._last = weakref.ref(self._kept)
        elif type(value) in TENSORS:
            if value.numel() <= 2**18:
                self._kept = value = value.detach()
            self._last = weakref.ref(value)
        known = variable.digest and not digester.opaque
        if known or variable.tensor or variable.number is not None:
            return variable
        return replace(variable, text=f"{variable.text}, not compared to its end")

    def _assign(self, source: str, frame: FrameType | None) -> None:
        code = compile(source, "<assignment>", "exec")
        own: Any = self.names.get()
        if frame is None:
            exec(code, own)  # noqa: S102
            return
        # In a copy, so that what it binds can be told from what was bound before, and nothing is
        # changed where it raises halfway.
        inner = frame.f_locals
        names = dict(inner)
        exec(code, globals_for(code, frame), names)  # noqa: S102
        changed = [name for name in names if names[name] is not inner.get(name, names)]
        changed = [name for name in changed if name != "__annotations__"]  # made by `x: int = 3`
        at, has_own = frame.f_code, frame.f_code.co_flags & inspect.CO_OPTIMIZED
        of_function = (*at.co_varnames, *at.co_cellvars, *at.co_freevars)
        unknown = [
            name
            for name in changed
            if has_own and name not in of_function and name not in frame.f_globals
        ]
        if unknown:
            raise NameError(
                f"{at.co_name} has no variable {unknown[0]}, and there is no global one"
            )
        for name in changed:
            # Where the function's code looks for it.
            is_own = not has_own or name in of_function
            (inner if is_own else frame.f_globals)[name] = names[name]
        if sys.version_info < (3, 13):
            # Before 3.13 a frame's variables are a copy, which is to be written back. Python itself
            # does so only after a trace function, and this thread may be paused in `breakpoint()`.
            write_back: Callable[..., Any] = ctypes.pythonapi.PyFrame_LocalsToFast
            write_back(ctypes.py_object(frame), ctypes.c_int(0))


def _in_words(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  # the user's own __str__
        return type(error).__name__


# -- whether an expression may issue a collective: looked up, and nothing of it is run ------

_NONE = object()


def issued_by(source: str, scopes: Sequence[Mapping[str, Any]]) -> str:
    """Return which collective an expression may issue, in words; empty where none is seen.

    Functions are looked into that it calls by name, and those that they call, three deep.
    """
    for node in ast.walk(syntax.parse(source)):
        if isinstance(node, ast.Call):
            path, called = [], node.func
            while isinstance(called, ast.Attribute):
                path.append(called.attr)
                called = called.value
            path.append(called.id if isinstance(called, ast.Name) else "")
            found = _issued_by_calling(_value(path[::-1], scopes), 3)
            if not found and path[1:] and path[0] == "backward":  # whatever has this method
                found = "backward, which has DDP reduce gradients"
            if found:
                return found
    return ""


def _value(path: Sequence[str], scopes: Sequence[Mapping[str, Any]]) -> Any:
    """The value of ``a.b.c``; `_NONE` where it is not known without running something."""
    value: Any = next((scope[path[0]] for scope in scopes if path[0] in scope), _NONE)
    for name in path[1:]:
        value = inspect.getattr_static(value, name, _NONE) if value is not _NONE else _NONE
        value = getattr(value, "__func__", value)
    return value


def _issued_by_calling(value: Any, depth: int) -> str:
    if inherits(value, DistributedDataParallel):
        return "the forward of a DDP model"
    if not inspect.isfunction(value):
        return ""
    if str(value.__module__).startswith("torch.distributed"):
        return value.__name__ if value.__name__ in WAITING_IN else ""
    if not depth or str(value.__module__).partition(".")[0] == "torch":
        return ""
    for path in {path for code in code_in(value.__code__) for path in _paths(code)}:
        found = _issued_by_calling(_value(path, (value.__globals__,)), depth - 1)
        if found:
            return found if ", in " in found else f"{found}, in {value.__name__}"
    return ""


def _paths(code: CodeType) -> set[tuple[str, ...]]:
    """The global names that code reads, each with the attributes that it reads of it."""
    paths = set[tuple[str, ...]]()
    path: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and path:
            path = (*path, str(instruction.argval))
            continue
        paths.add(path)
        is_name = instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        path = (str(instruction.argval),) if is_name else ()
    return paths - {()}
