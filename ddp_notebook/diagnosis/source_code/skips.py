"""Ways from one backward to the next on which code skips the step and clears no gradients."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from ddp_notebook.diagnosis.source_code.conditions import holds, last_name
from ddp_notebook.diagnosis.source_code.shared_names import names_in
from ddp_notebook.diagnosis.source_code.statements import blocks

_CLEARS = ("zero_grad",)


def skipping_test(tree: ast.Module | None, line: int) -> ast.expr | None:
    """The test by which the code goes from a backward to the next one, without clearing."""
    counters = _counters(tree) if tree is not None else set()
    for block in blocks(tree) if tree is not None else ():
        at = next((i for i, s in enumerate(block) if _is_at(s, line)), None)
        if at is None or any(_calls(statement, *_CLEARS) for statement in block[: at + 1]):
            continue
        found = _way_around(block[at + 1 :])
        if found is not None and counters.isdisjoint(names_in(found)):
            return found
    return None


def _counters(tree: ast.AST) -> set[str]:
    """Names that are added to: a test of one tells how much has been accumulated."""
    added = (node.target for node in ast.walk(tree) if isinstance(node, ast.AugAssign))
    return {last_name(target) for target in added} - {""}


def _way_around(after: Sequence[ast.stmt]) -> ast.expr | None:
    for i, statement in enumerate(after):
        test = _skips(statement, after[i + 1 :]) if isinstance(statement, ast.If) else None
        if test is not None or _calls(statement, *_CLEARS, "step"):
            return test
    return None


def _skips(branch: ast.If, rest: Sequence[ast.stmt]) -> ast.expr | None:
    """The test that leads around a step that is in `rest`, or that is in the branch itself."""
    if _counts(branch.test):
        return None
    leaves = isinstance(branch.body[-1], ast.Continue | ast.Return)
    cleared = any(_calls(statement, *_CLEARS, "step") for statement in branch.body)
    if leaves and not cleared and _steps(rest):
        return branch.test
    inside = _steps(branch.body) and not branch.orelse and not _steps(rest)
    return ast.copy_location(ast.UnaryOp(ast.Not(), branch.test), branch.test) if inside else None


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
        isinstance(child, ast.Call) and last_name(child.func) in names for child in ast.walk(node)
    )
