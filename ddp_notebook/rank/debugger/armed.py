"""Whether ranks may be paused: what is issued meanwhile must not time out."""

from __future__ import annotations

import ast
from collections.abc import Callable

_STOPS = frozenset({"breakpoint", "set_trace"})


class Armed:
    """Why this rank may be paused, or wait for one that is. `tell` hears whether it may."""

    def __init__(self) -> None:
        self.tell: Callable[[bool], None] = lambda armed: None
        self._enabled = True
        self._is_set = False
        self._in_run = False
        self._stops: dict[str, bool] = {}
        """Functions and classes of the user's cells: whether they call `breakpoint()`."""

    def breakpoints(self, *, enabled: bool, there: bool) -> None:
        """Those of the session: `there` are some, maybe of another rank. Not `enabled`: no rank
        stops, at `breakpoint()` neither."""
        self._enabled, self._is_set = enabled, there
        self._tell()

    def in_run(self, paused: bool = True) -> None:
        """This rank is paused in this run; or a run begins, or has ended, and it is not yet."""
        self._in_run = paused
        self._tell()

    def runs(self, tree: ast.AST) -> None:
        """A cell or a script begins: it, or what cells before it have defined, may stop."""
        for each in ast.iter_child_nodes(tree):
            stops = any(_name(node) in _STOPS for node in ast.walk(each))
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self._stops[each.name] = stops
            self._in_run |= stops
        self._in_run |= any(self._stops.values())
        self._tell()

    def _tell(self) -> None:
        self.tell(self._enabled and (self._is_set or self._in_run))


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""
