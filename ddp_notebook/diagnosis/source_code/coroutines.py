"""Coroutines that an event loop runs beside each other: in which order is up to each rank."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from ddp_notebook.diagnosis.source_code.conditions import last_name

_BESIDE = ("gather", "create_task", "ensure_future", "as_completed", "start_soon", "wait")


def run_beside(trees: Iterable[ast.AST], one: str, other: str) -> bool:
    """True of two `async def` functions that are both handed to an event loop as tasks."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    coroutines = {node.name for node in nodes if isinstance(node, ast.AsyncFunctionDef)}
    calls = [n for n in nodes if isinstance(n, ast.Call) and last_name(n.func) in _BESIDE]
    inside = [part for call in calls for expression in call.args for part in ast.walk(expression)]
    tasks = {last_name(part.func) for part in inside if isinstance(part, ast.Call)}
    return one != other and {one, other} <= coroutines & tasks
