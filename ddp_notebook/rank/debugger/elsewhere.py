"""Code that this process does not run as Python: compiled, or run by data workers."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch.utils.data import DataLoader

from ddp_notebook.rank import torch_private
from ddp_notebook.rank.component import Component, Run
from ddp_notebook.rank.debugger.lines import Lines
from ddp_notebook.rank.inspect.frames import code_in
from ddp_notebook.rank.inspect.objects import objects_of

_WHOLE = (
    "torch.compile(fullgraph=True) has {name} compiled as a whole, with what it calls: no Python "
    "line of it runs. Stop in what calls it, or leave fullgraph out while you look"
)
_COMPILED = (
    "torch.compile has {name} compiled, with what it calls, and nothing stops in that. Stop in "
    "what calls it, or leave torch.compile out while you look"
)
_AS_PYTHON = (
    "torch.compile has {name} compiled; while this breakpoint is set, that runs as Python, from "
    "the next cell or script on"
)
_WORKERS = (
    "a DataLoader's {count} worker processes run it too, and do not stop there: "
    "DataLoader(num_workers=0)"
)


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A unit that torch.compile compiled: its code, with all that was compiled in it."""

    root: CodeType
    codes: Sequence[CodeType]
    as_python: bool
    """It is not used: there are lines to stop at."""


class Compiled(Component):
    """Code that torch.compile has compiled: what has breakpoints is not used.

    `canonical` gives a file one name.
    """

    def __init__(self, canonical: Callable[[str], str]) -> None:
        self._canonical = canonical
        self._lines: Lines = {}
        self._known: dict[int, _Compiled] = {}
        """By the id of its code, the newest last."""
        self._hears = False

    def run_begins(self, run: Run) -> None:
        """Compile again what was compiled for other breakpoints than the present ones.

        Only here: a thread may be in it while something runs.
        """
        self._hears = self._hears or torch_private.on_compiled(self._chosen, load=bool(self._lines))
        for key, known in list(self._known.items()):
            if known.as_python != self._has_lines(known.codes):
                del self._known[key]
                torch_private.compile_again(known.root)

    def watch(self, lines: Lines) -> None:
        """These are the lines of breakpoints now."""
        self._lines = lines

    def _chosen(self, root: CodeType, codes: Sequence[CodeType]) -> bool:
        known = _Compiled(root, codes, self._has_lines(codes))
        self._known.pop(id(root), None)
        self._known[id(root)] = known
        if len(self._known) > 1_000:
            del self._known[next(iter(self._known))]
        return known.as_python

    def _has_lines(self, codes: Iterable[CodeType]) -> bool:
        return any(
            line in lines
            for code in codes
            if (lines := self._lines.get(self._canonical(code.co_filename)))
            for _, _, line in code.co_lines()
        )

    def never_runs(self, file: str, line: int) -> str:
        """Why nothing can stop at a line, empty when something can. `file` is its real path."""
        name = "" if self._hears else _compiled(file, line, wholes=(True,))
        return _WHOLE.format(name=name) if name else ""

    def not_stopped(self, file: str, line: int) -> str:
        """Who runs a line and does not stop there: compiled code, or processes of DataLoaders."""
        name = _compiled(file, line, wholes=(True, False))
        if name:
            return (_AS_PYTHON if self._hears else _COMPILED).format(name=name)
        for loader in (e for e in objects_of(DataLoader) if getattr(e, "num_workers", 0)):
            given = (loader.collate_fn, loader.worker_init_fn, loader.dataset)
            held = vars(loader.dataset).values() if hasattr(loader.dataset, "__dict__") else ()
            roots = (root for each in (*given, *held) for root in _roots(each))
            if _has(_reached(roots), file, line):
                return _WORKERS.format(count=loader.num_workers)
        return ""


def _compiled(file: str, line: int, wholes: Collection[bool]) -> str:
    """Return the names of what has a line compiled, with `fullgraph` or without."""
    names = {
        name
        for name, compiled, is_whole in torch_private.compiled()
        if is_whole in wholes and _has(_reached(_roots(compiled)), file, line)
    }
    return ", ".join(sorted(names))


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
    # So many functions that functions call are looked into.
    while waiting and len(seen) < 200:
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
