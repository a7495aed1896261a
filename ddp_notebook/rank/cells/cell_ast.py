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
    # After the docstring and ``from __future__``, which must come first.
    first = int(ast.get_docstring(module, clean=False) is not None)
    while first < len(nodes) and getattr(nodes[first], "module", "") == "__future__":
        first += 1
    call = ast.Expr(ast.Call(ast.Name(begin, ast.Load()), [], []))
    for node in ast.walk(call):
        ast.copy_location(node, nodes[min(first, len(nodes) - 1)])
    nodes.insert(first, call)
