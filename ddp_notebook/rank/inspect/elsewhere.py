"""Code that this process does not run as Python: compiled, or run by data workers."""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.utils.data import DataLoader

from ddp_notebook.rank import torch_private
from ddp_notebook.rank.inspect.frames import code_in

_MOST = 200
"""So many functions that functions call are looked into."""
_WHOLE = (
    "torch.compile(fullgraph=True) has {name} compiled as a whole, with what it calls: no Python "
    "line of it runs. Stop in what calls it, or leave fullgraph out while you look"
)
_COMPILED = (
    "torch.compile has {name} compiled, with what it calls, and from Python 3.12 on nothing stops "
    "in that. Stop in what calls it, or leave torch.compile out while you look"
)
_WORKERS = (
    "a DataLoader's {count} worker processes run it too, and do not stop there: "
    "DataLoader(num_workers=0)"
)


def never_runs(file: str, line: int) -> str:
    """Why nothing can stop at a line, empty when something can. `file` is its real path."""
    name = _compiled(file, line, whole=True)
    return _WHOLE.format(name=name) if name else ""


def _compiled(file: str, line: int, *, whole: bool) -> str:
    """What has a line compiled, with `fullgraph` or without; empty for nothing."""
    for name, compiled, is_whole in torch_private.compiled():
        if is_whole == whole and _has(_reached(_roots(compiled)), file, line):
            return name
    return ""


def not_stopped(file: str, line: int) -> str:
    """Who runs a line and does not stop there: compiled code, or processes of DataLoaders."""
    # Before Python 3.12 a call of ours is in the line, and the compiler leaves that out.
    name = _compiled(file, line, whole=False) if hasattr(sys, "monitoring") else ""
    if name:
        return _COMPILED.format(name=name)
    for loader in _loaders():
        given = (loader.collate_fn, loader.worker_init_fn, loader.dataset)
        held = vars(loader.dataset).values() if hasattr(loader.dataset, "__dict__") else ()
        roots = (root for each in (*given, *held) for root in _roots(each))
        if _has(_reached(roots), file, line):
            return _WORKERS.format(count=loader.num_workers)
    return ""


def _loaders() -> list[Any]:
    loaders = (each for each in gc.get_objects() if issubclass(type(each), DataLoader))
    return [each for each in loaders if getattr(each, "num_workers", 0)]


_METHODS = ("forward", "__call__", "__getitem__", "__getitems__", "__iter__", "__len__")


def _roots(value: Any) -> Iterator[FunctionType]:
    """The functions that run when `value` is called, goes forward or gives its items."""
    static: Callable[..., Any] = inspect.getattr_static
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, MethodType):
        yield from _roots(value.__func__)
        yield from _roots(value.__self__)
    elif isinstance(value, torch.nn.Module):
        for part in value.modules():
            yield from _roots(static(type(part), "forward", None))
    elif type(value).__module__ != "builtins":
        for name in _METHODS:
            yield from _roots(static(type(value), name, None))


def _reached(roots: Iterable[FunctionType]) -> Iterator[FunctionType]:
    """`roots`, and the functions that they call by name."""
    waiting, seen = list(roots), set[int]()
    while waiting and len(seen) < _MOST:
        function = waiting.pop()
        if id(function) in seen or str(function.__module__).partition(".")[0] == "torch":
            continue
        seen.add(id(function))
        yield function
        for code in code_in(function.__code__):
            called = (function.__globals__.get(name) for name in code.co_names)
            waiting += [each for each in called if isinstance(each, FunctionType)]


def _has(functions: Iterable[FunctionType], file: str, line: int) -> bool:
    return any(
        at == line
        for function in functions
        if os.path.realpath(function.__code__.co_filename) == file
        or function.__code__.co_filename == file
        for code in code_in(function.__code__)
        for _, _, at in code.co_lines()
    )
