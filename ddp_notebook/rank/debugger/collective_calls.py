"""Whether an expression may issue a collective: looked up, and nothing of it is run."""

from __future__ import annotations

import ast
import dis
import inspect
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.rank.inspect import safe_repr
from ddp_notebook.rank.inspect.frames import WAITING_IN, code_in

_DEEPEST = 3
"""So far functions that functions call are looked into."""
_NAMES = frozenset(WAITING_IN)
_NONE = object()

Scopes = Sequence[Mapping[str, Any]]
"""Where names are looked up, the innermost first."""


def issued_by(source: str, scopes: Scopes) -> str:
    """Which collective an expression may issue, in words; empty where none is seen."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            path = list(_path(node.func))
            found = _by_value(_value(path, scopes), _DEEPEST) or _by_name(path)
            if found:
                return found
    return ""


def _path(node: ast.expr) -> Iterator[str]:
    """``a.b.c`` as its names; the first is empty where it begins with another expression."""
    if isinstance(node, ast.Attribute):
        yield from _path(node.value)
        yield node.attr
    else:
        yield node.id if isinstance(node, ast.Name) else ""


def _by_name(path: Sequence[str]) -> str:
    """Where nothing is known of the value: by how its method is called."""
    return "backward, which has DDP reduce gradients" if path[1:] and path[-1] == "backward" else ""


def _value(path: Sequence[str], scopes: Scopes) -> Any:
    value: Any = next((scope[path[0]] for scope in scopes if path[0] in scope), _NONE)
    for name in path[1:]:
        value = inspect.getattr_static(value, name, _NONE) if value is not _NONE else _NONE
        value = getattr(value, "__func__", value)
    return value


def _by_value(value: Any, depth: int) -> str:
    if safe_repr.inherits(value, DistributedDataParallel):
        return "the forward of a DDP model"
    code = getattr(value, "__code__", None) if inspect.isfunction(value) else None
    if code is None:
        return ""
    if str(value.__module__).startswith("torch.distributed"):
        return value.__name__ if value.__name__ in _NAMES else ""
    return _by_code(value, code, depth)


def _by_code(function: Any, code: CodeType, depth: int) -> str:
    """What a function of the user's may issue: itself, or in what it calls by name."""
    if not depth or str(function.__module__).partition(".")[0] == "torch":
        return ""
    for path in {path for inner in code_in(code) for path in _paths(inner)}:
        found = _by_value(_value(path, (function.__globals__,)), depth - 1)
        if found:
            return found if ", in " in found else f"{found}, in {function.__name__}"
    return ""


def _paths(code: CodeType) -> Iterator[tuple[str, ...]]:
    """The global names that code reads, each with the attributes that it reads of it."""
    path: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and path:
            path = (*path, str(instruction.argval))
            continue
        if path:
            yield path
        is_name = instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        path = (str(instruction.argval),) if is_name else ()
