"""Ways from one backward to the next on which code skips the step and clears no gradients."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from ddp_notebook.diagnosis.source_code.conditions import holds, last_name

_CLEARS = ("zero_grad",)


def skipping_test(tree: ast.Module | None, line: int) -> ast.expr | None:
    """The test by which the code goes from a backward to the next one, without clearing."""
    for block in _blocks(tree) if tree is not None else ():
        at = next((i for i, s in enumerate(block) if _is_at(s, line)), None)
        if at is None or any(_calls(each, *_CLEARS) for each in block[: at + 1]):
            continue
        found = _way_around(block[at + 1 :])
        if found is not None:
            return found
    return None


def _way_around(after: Sequence[ast.stmt]) -> ast.expr | None:
    for i, each in enumerate(after):
        if isinstance(each, ast.If) and not _counts(each.test):
            rest = after[i + 1 :]
            leaves = bool(each.body) and isinstance(each.body[-1], ast.Continue | ast.Return)
            around = _steps(rest) and leaves and not _steps(each.body)
            inside = _steps(each.body) and not each.orelse and not _steps(rest)
            if around and not any(_calls(s, *_CLEARS) for s in each.body):
                return each.test
            if inside:
                return ast.copy_location(ast.UnaryOp(ast.Not(), each.test), each.test)
        if _calls(each, *_CLEARS, "step"):
            return None
    return None


def _steps(block: Sequence[ast.stmt]) -> bool:
    """True of statements that make a step and clear the gradients."""
    return any(_calls(s, "step") for s in block) and any(_calls(s, *_CLEARS) for s in block)


def _counts(test: ast.expr) -> bool:
    """True of a test by how many there were: so gradients are accumulated."""
    return any(isinstance(node, ast.Mod) for node in ast.walk(test)) or not any(
        isinstance(node, ast.Call | ast.Compare) for node in ast.walk(test)
    )


def _is_at(statement: ast.stmt, line: int) -> bool:
    return not hasattr(statement, "body") and holds(statement, line)


def _calls(node: ast.AST, *names: str) -> bool:
    return any(
        isinstance(each, ast.Call) and last_name(each.func) in names for each in ast.walk(node)
    )


def _blocks(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield block
