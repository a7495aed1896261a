"""The code of a function, by the name that its user has for it."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import Iterable, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

from ddp_notebook.rank.inspect.frames import IsUsers

_DEEPEST = 20
"""So many wrappers around a function are looked through."""


def named(name: str, names: Mapping[str, Any], is_users: IsUsers) -> Any:
    """What the user calls so: of the notebook's `names`, a module's, or a function's own."""
    first, *rest = name.split(".")
    if first in names:
        return _attribute(names[first], rest)
    for end in range(len(name.split(".")) - 1, 0, -1):
        module = sys.modules.get(".".join(name.split(".")[:end]))
        if module is not None:
            return _attribute(module, name.split(".")[end:])
    functions = [
        each
        for each in gc.get_objects()
        if type(each) is FunctionType and _ends(each.__code__.co_qualname, name)
    ]
    users = [each for each in functions if is_users(each.__code__.co_filename)]
    return next(iter(users or functions), None)


def _ends(qualified: str, name: str) -> bool:
    qualified = qualified.replace(".<locals>", "")
    return qualified == name or qualified.endswith(f".{name}")


def _attribute(value: Any, names: Iterable[str]) -> Any:
    for name in names:
        value = _member(value, name)
    return value


def _member(value: Any, name: str) -> Any:
    """An attribute, a part of a model, or the code of a function that is defined in a function."""
    found = inspect.getattr_static(value, name, None)
    if found is not None:
        return found
    parts = inspect.getattr_static(value, "_modules", None)
    if type(parts) is dict and name in parts:
        return parts[name]
    code = code_of(value)
    inner = (each for each in (code.co_consts if code else ()) if inspect.iscode(each))
    return next((each for each in inner if each.co_name == name), None)


def code_of(value: Any) -> CodeType | None:
    """What runs when `value` is called, or a model goes forward; None where it is not Python."""
    for _ in range(_DEEPEST):
        if isinstance(value, CodeType):
            return value
        inner = _wrapped(value)
        if inner is not None:
            value = inner
        elif isinstance(value, FunctionType):
            return value.__code__
        elif inspect.isclass(value):
            static = inspect.getattr_static
            value = static(value, "forward", None) or static(value, "__init__", None)
        else:
            static, kind = inspect.getattr_static, type(value)
            value = static(kind, "forward", None) or static(kind, "__call__", None)
    return None


def _wrapped(value: Any) -> Any:
    """The function or the model that another one, a method or a property is around; or None."""
    if isinstance(value, property):
        return value.fget
    if isinstance(value, functools.partial | functools.cached_property):
        return value.func
    if isinstance(value, staticmethod | classmethod | MethodType):
        return value.__func__
    parts = inspect.getattr_static(value, "_modules", None)
    if type(parts) is dict and type(value).__module__.startswith("torch."):
        return parts.get("module") or parts.get("_orig_mod")  # DDP's, and torch.compile's
    return inspect.getattr_static(value, "__wrapped__", None)


def first_line(code: CodeType) -> int:
    """The first line of a function's body; of one that is a single line, that."""
    lines = [line for _, _, line in code.co_lines() if line]
    return next((line for line in lines if line > lines[0]), lines[0])
