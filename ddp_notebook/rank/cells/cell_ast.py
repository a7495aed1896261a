"""A cell as one module: our calls first and around its last expression, nothing else moved."""

from __future__ import annotations

import ast
from collections.abc import Sequence


def as_module(statements: Sequence[ast.stmt], show: str) -> ast.Module:
    """The module of a cell's `statements`, of which there is at least one.

    It calls ``show(value)`` with the value of its last expression.
    """
    nodes = list(statements)
    if isinstance(nodes[-1], ast.Expr):
        last = nodes[-1]
        call = ast.Call(ast.Name(show, ast.Load()), [last.value], [])
        # Only the wrapping call takes a place: the user's expression keeps its own.
        shown = ast.copy_location(ast.Expr(ast.copy_location(call, last.value)), last)
        ast.copy_location(call.func, last.value)
        nodes = [*nodes[:-1], shown]
    return ast.Module(nodes, [])


def begin_with(module: ast.Module, begin: str) -> None:
    """Have `module` call ``begin()`` first: no line of the user's, where nothing is to stop."""
    nodes = module.body
    first = _first_after_future_imports(nodes)
    nodes.insert(first, _call_at(begin, nodes[min(first, len(nodes) - 1)]))


def _first_after_future_imports(nodes: list[ast.stmt]) -> int:
    """Where a statement may be put first: after the docstring and ``from __future__``."""
    for place, node in enumerate(nodes):
        docstring = (
            place == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        )
        future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        if not docstring and not future:
            return place
    return len(nodes)


def _call_at(name: str, other: ast.stmt) -> ast.stmt:
    """A statement that calls `name`, at the place of another one."""
    call = ast.Expr(ast.Call(ast.Name(name, ast.Load()), [], []))
    for node in ast.walk(call):
        ast.copy_location(node, other)
    return call
