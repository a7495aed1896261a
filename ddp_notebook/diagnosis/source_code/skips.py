"""Ways from one backward to the next on which code skips the step and clears no gradients."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from ddp_notebook.diagnosis.source_code.conditions import holds, last_name
from ddp_notebook.diagnosis.source_code.shared_names import SharedNames, names_in
from ddp_notebook.diagnosis.source_code.statements import LOOPS, blocks

_CLEARS = ("zero_grad",)


def skipping_test(tree: ast.Module | None, line: int) -> ast.expr | None:
    """The test by which the code goes from a backward to the next one, without clearing."""
    return _Code(tree).skipping_test(line) if tree is not None else None


class _Code:
    """The code of one file; what its functions do counts where they are called."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._names = SharedNames([tree])

    def skipping_test(self, line: int) -> ast.expr | None:
        counters = _counters(self._tree)
        for block in blocks(self._tree):
            at = next((i for i, s in enumerate(block) if _is_at(s, line)), None)
            if at is None or any(self._calls(statement, *_CLEARS) for statement in block[: at + 1]):
                continue
            after = block[at + 1 :]
            found = self._way_around(after)
            if found is None or not counters.isdisjoint(names_in(found)):
                continue
            if not self._clears_in_another_loop(after):
                return found
        return None

    def _way_around(self, after: Sequence[ast.stmt]) -> ast.expr | None:
        for i, statement in enumerate(after):
            if isinstance(statement, ast.If):
                test = self._skips(statement, after[i + 1 :])
                if test is not None:
                    return test
            if self._calls(statement, *_CLEARS, "step"):
                return None
        return None

    def _skips(self, branch: ast.If, rest: Sequence[ast.stmt]) -> ast.expr | None:
        """The test that leads around a step that is in `rest`, or that is in the branch itself."""
        if _counts(branch.test):
            return None
        leaves = isinstance(branch.body[-1], ast.Continue | ast.Return)
        cleared = any(self._calls(statement, *_CLEARS, "step") for statement in branch.body)
        if leaves and not cleared and self._steps(rest):
            return branch.test
        if self._steps(branch.body) and not branch.orelse and not self._steps(rest):
            return ast.copy_location(ast.UnaryOp(ast.Not(), branch.test), branch.test)
        return None

    def _steps(self, block: Sequence[ast.stmt]) -> bool:
        """True of statements that make a step and clear the gradients."""
        return all(any(self._calls(s, *names) for s in block) for names in (("step",), _CLEARS))

    def _clears_in_another_loop(self, after: Sequence[ast.stmt]) -> bool:
        """True if a loop clears gradients elsewhere than after the backward: before it, perhaps."""
        here = {id(call) for statement in after for call in self._calls(statement, *_CLEARS)}
        loops = (node for node in ast.walk(self._tree) if isinstance(node, LOOPS))
        calls = (call for loop in loops for call in self._calls(loop, *_CLEARS))
        return any(id(call) not in here for call in calls)

    def _calls(self, node: ast.AST, *names: str) -> list[ast.Call]:
        """The calls of these names in a piece of code, and in the functions that it calls."""
        return [
            child
            for code in self._names.reached_from([node])
            for child in ast.walk(code)
            if isinstance(child, ast.Call) and last_name(child.func) in names
        ]


def _counters(tree: ast.AST) -> set[str]:
    """Names that are added to: a test of one tells how much has been accumulated."""
    added = (node.target for node in ast.walk(tree) if isinstance(node, ast.AugAssign))
    return {last_name(target) for target in added} - {""}


def _counts(test: ast.expr) -> bool:
    """True of a test by how many there were: so gradients are accumulated."""
    return any(isinstance(node, ast.Mod) for node in ast.walk(test)) or not any(
        isinstance(node, ast.Call | ast.Compare) for node in ast.walk(test)
    )


def _is_at(statement: ast.stmt, line: int) -> bool:
    return not hasattr(statement, "body") and holds(statement, line)
