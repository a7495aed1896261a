"""The user's code as it is loaded: whether it may pause ranks, and whether it was edited since.

Collectives issued while ranks may be paused must not time out.
"""

from __future__ import annotations

import ast
import importlib.machinery
import inspect
import os
import sys
import time
from collections.abc import Callable
from types import CodeType
from typing import Any

_STOPS = frozenset({"breakpoint", "set_trace"})


class Loaded:
    """When the files of the user's were last edited before they were loaded."""

    def __init__(self) -> None:
        self._edited_ns: dict[str, int] = {}
        self._began_ns = time.time_ns()
        """From when on what is loaded is known here."""

    def add(self, file: str) -> None:
        """It is loaded now."""
        self._edited_ns[file] = _edited_ns(file)

    def note(self, file: str) -> str:
        """That `file` is not what runs; empty where nothing tells that."""
        if file.startswith("<"):
            return ""
        known, now_ns = self._edited_ns.get(file), _edited_ns(file)
        edited = now_ns != known if known is not None else now_ns > self._began_ns
        return "its file was edited after it was loaded: what runs is as it was" if edited else ""


def _edited_ns(file: str) -> int:
    try:
        return os.stat(file).st_mtime_ns  # noqa: PTH116
    except (OSError, ValueError):
        return 0


class Armed:
    """Why this rank may be paused, or wait for one that is. `tell` hears whether it may."""

    def __init__(self) -> None:
        self.tell: Callable[[bool], None] = lambda armed: None
        self._enabled = True
        self._is_set = False
        self._in_run = False
        self._stops: dict[str, bool] = {}
        """Functions and classes of the user's cells: whether they call `breakpoint()`."""
        self._modules: set[str] = set()
        """The user's modules that do, and were imported."""
        self.loaded = Loaded()
        self.on_load: Callable[[str], None] = lambda file: None
        """Called with the file of each module of the user's that is about to run."""

    def attach(self, is_users: Callable[[str], bool]) -> None:
        """Look at each module of the user's that is imported from now on."""
        # Where `import` itself gets code, so that a reload and an import in a thread come by, too;
        # a finder on `sys.meta_path` would have to find modules in our place.
        loader = importlib.machinery.SourceFileLoader
        plain = loader.get_code

        def get_code(own: Any, fullname: str) -> CodeType | None:
            code = plain(own, fullname)
            if code is not None and is_users(code.co_filename):
                self.loaded.add(code.co_filename)
                self.on_load(code.co_filename)
                if _names_stop(code):  # it may stop, in this run and in those that come
                    self._modules.add(fullname)
                    self.in_run()
            return code

        loader.get_code = get_code  # type: ignore[method-assign, assignment]

    def breakpoints(self, *, enabled: bool, there: bool) -> None:
        """Take the session's breakpoints: `there` are some, maybe of another rank.

        Not `enabled`: no rank stops, not even at `breakpoint()`."""
        self._enabled, self._is_set = enabled, there
        self._tell()

    def in_run(self, paused: bool = True) -> None:
        """This rank is paused in this run; or a run begins, or has ended, and it is not yet."""
        self._in_run = paused
        self._tell()

    def runs(self, tree: ast.AST) -> None:
        """A cell or a script begins: it, or what cells before it have defined, may stop."""
        for child in ast.iter_child_nodes(tree):
            nodes = ast.walk(child)
            stops = any(getattr(n, "id", getattr(n, "attr", "")) in _STOPS for n in nodes)
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self._stops[child.name] = stops
            self._in_run |= stops
        self._modules &= sys.modules.keys()
        self._in_run |= bool(self._modules) or any(self._stops.values())
        self._tell()

    def _tell(self) -> None:
        # Before a collective is issued: its timeout is given to gloo and NCCL with it, and cannot
        # be changed afterwards. So it is not enough to say it when a rank is paused.
        self.tell(self._enabled and (self._is_set or self._in_run))


def _names_stop(code: CodeType) -> bool:
    inner = (const for const in code.co_consts if inspect.iscode(const))
    return not _STOPS.isdisjoint(code.co_names) or any(map(_names_stop, inner))
