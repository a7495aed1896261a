"""Buckets of gradients that code sends when they are full, and never sends once more at the end."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from ddp_notebook.diagnosis.source_code.conditions import holds, last_name
from ddp_notebook.diagnosis.source_code.sources import Sources
from ddp_notebook.diagnosis.source_code.statements import LOOPS, blocks
from ddp_notebook.model import Place


def unsent_bucket(sources: Sources, path: Sequence[Place]) -> str:
    """The list that a loop on the way to a collective fills, and sends only where it is full.

    Empty where there is none, or where it is used after the loop.
    """
    for place in path:
        for block in blocks(sources.tree(place) or ast.Module([], [])):
            for at, loop in enumerate(block):
                if isinstance(loop, LOOPS) and holds(loop, place.line):
                    name = _sent_when_full(loop, place.line)
                    if name and not any(_mentions(each, name) for each in block[at + 1 :]):
                        return name
    return ""


def _sent_when_full(loop: ast.stmt, line: int) -> str:
    """The list that grows in each turn of a loop, and is begun anew under the test at a line."""
    nodes = list(ast.walk(loop))
    tests = [n for n in nodes if isinstance(n, ast.If) and holds(n, line) and not n.orelse]
    under = {node for test in tests for each in test.body for node in ast.walk(each)}
    grown = {_grown(node) for node in nodes if node not in under} - {""}
    begun = {_begun(node) for node in under} - {""}
    return min(grown & begun, default="")


def _grown(node: ast.AST) -> str:
    match node:
        case ast.Call(func=ast.Attribute(value=value, attr="append")):
            return last_name(value)
        case ast.AugAssign(target=target, op=ast.Add(), value=ast.List()):
            return last_name(target)
    return ""


def _begun(node: ast.AST) -> str:
    match node:
        case ast.Call(func=ast.Attribute(value=value, attr="clear")):
            return last_name(value)
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
            pairs = zip(names, values, strict=False)
            return next((last_name(n) for n, v in pairs if _is_empty(v)), "")
        case ast.Assign(targets=[target], value=value) if _is_empty(value):
            return last_name(target)
    return ""


def _is_empty(node: ast.AST) -> bool:
    return isinstance(node, ast.List) and not node.elts


def _mentions(statement: ast.stmt, name: str) -> bool:
    return any(last_name(node) == name for node in ast.walk(statement))
