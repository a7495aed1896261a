"""Ranks at different lines of one function: the test in the code that parted them."""

from __future__ import annotations

import ast

from ddp_notebook.diagnosis.source_code.conditions import Test, tests_around


def parting(source: str, most: int, other: int) -> str:
    """Why ranks at line `other` are not at line `most`, in words; empty when nothing tells.

    ``other branch: `if rank == 1` ``. It is said from the lines alone: a rank that was stepped
    further than the others is inside a test that they have not come to.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ""
    lines = source.splitlines()
    theirs, own = (list(tests_around(tree, line, "")) for line in (most, other))
    for test in own:
        if not _is_in(test, theirs):
            inside = "inside" if most <= test.line else "other branch:"
            return f"{inside} `{_shown(test, lines)}`"
    for test in theirs:
        if not _is_in(test, own) and other > test.line:
            return f"outside `{_shown(test, lines)}`"
    return ""


def _is_in(test: Test, tests: list[Test]) -> bool:
    return any((each.line, each.wanted) == (test.line, test.wanted) for each in tests)


def _shown(test: Test, lines: list[str]) -> str:
    if test.shown:
        return test.shown
    text = lines[test.line - 1].strip() if 0 < test.line <= len(lines) else ""
    return text.removesuffix(":") or f"line {test.line}"
