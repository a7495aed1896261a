"""Whether an expression may issue a collective: looked up, and nothing of it is run."""

from __future__ import annotations

import ast
import dis
import inspect
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.rank.inspect import safe_repr
from ddp_notebook.rank.inspect.frames import WAITING_IN, code_in

_NONE = object()

Scopes = Sequence[Mapping[str, Any]]
"""Where names are looked up, the innermost first."""


def issued_by(source: str, scopes: Scopes) -> str:
    """Return which collective an expression may issue, in words; empty where none is seen.

    Functions are looked into that it calls by name, and those that they call, three deep.
    """
    for node in ast.walk(ast.parse(source)):
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


def _value(path: Sequence[str], scopes: Scopes) -> Any:
    """The value of ``a.b.c``; `_NONE` where it is not known without running something."""
    value: Any = next((scope[path[0]] for scope in scopes if path[0] in scope), _NONE)
    for name in path[1:]:
        value = inspect.getattr_static(value, name, _NONE) if value is not _NONE else _NONE
        value = getattr(value, "__func__", value)
    return value


def _issued_by_calling(value: Any, depth: int) -> str:
    if safe_repr.inherits(value, DistributedDataParallel):
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
