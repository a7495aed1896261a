"""Source with calls of ours before the lines of breakpoints: no tracing, until one is hit."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Sequence

HOOK = "__ddp_line__"
"""The built-in function that such a call calls: with a number, and of a `for` loop where it is.

A breakpoint at the head of a loop stops in every round, as Python's own tracing does: `for` calls
before the loop and as each round begins, `while` in its test.
"""
BEFORE_LOOP, IN_ROUND = 1, 2
_BODIES = ("body", "orelse", "finalbody")


def instrument(tree: ast.AST, number_of: Callable[[int], int | None]) -> bool:
    """Put calls into `tree`, with the number that `number_of` has for a line; True for any."""
    return _Instrument(number_of).into(tree)


def line_with_code(tree: ast.AST, wanted: int) -> int | None:
    """The line to stop at for a `wanted` one: of the statement that it is in, or the next one."""
    spans = [_span(node) for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    spans += [_span(node.body) for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            spans = [span for span in spans if span != _span(node.body[0])]
    around = [first for first, last in spans if first <= wanted <= last]
    return max(around, default=min((first for first, _ in spans if first > wanted), default=None))


def _span(node: ast.stmt | ast.expr) -> tuple[int, int]:
    """The first and last line of a node that are its own: of a loop or a function, its head."""
    first = _first_line(node) if isinstance(node, ast.stmt) else node.lineno
    body = getattr(node, "body", None)
    if isinstance(body, list) and body:
        return first, max(node.lineno, body[0].lineno - 1)
    return first, node.end_lineno or first


class _Instrument:
    def __init__(self, number_of: Callable[[int], int | None]) -> None:
        self._number_of = number_of
        self._any = False

    def into(self, tree: ast.AST) -> bool:
        for node in list(ast.walk(tree)):
            for name in _BODIES:
                body = getattr(node, name, None)
                if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                    setattr(node, name, self._with_calls(node, name, body))
            if isinstance(node, ast.Lambda):
                self._lambda(node)
            elif isinstance(node, ast.For | ast.AsyncFor | ast.While):
                self._each_round(node)
        return self._any

    def _with_calls(self, owner: ast.AST, name: str, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        begin = _after_what_must_be_first(owner, body) if name == "body" else 0
        made = list(body[:begin])
        placed: set[int] = set()
        for statement in body[begin:]:
            line = _first_line(statement)
            number = self._number_of(line)
            in_test = isinstance(statement, ast.While)
            if number is not None and line not in placed and not in_test:
                placed.add(line)
                loops = isinstance(statement, ast.For | ast.AsyncFor)
                call = _call(number, *([BEFORE_LOOP] if loops else []))
                made.append(_at(ast.Expr(call), statement, line))
                self._any = True
            made.append(statement)
        return made

    def _lambda(self, node: ast.Lambda) -> None:
        number = self._number_of(node.body.lineno)
        if number is not None:
            node.body = _after_call(number, node.body)
            self._any = True

    def _each_round(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        number = self._number_of(node.lineno)
        if number is None:
            return
        self._any = True
        if isinstance(node, ast.While):
            node.test = _after_call(number, node.test)
        else:
            node.body.insert(0, _at(ast.Expr(_call(number, IN_ROUND)), node, node.lineno))


def _after_what_must_be_first(owner: ast.AST, body: Sequence[ast.stmt]) -> int:
    """How many statements are a docstring or ``from __future__``."""
    first = body[0]
    count = 0
    if isinstance(owner, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            count = int(isinstance(first.value.value, str))
        while count < len(body) and _is_future(body[count]):
            count += 1
    return count


def _is_future(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def _first_line(statement: ast.stmt) -> int:
    """Where it begins: a function or class with its first decorator."""
    decorators: Collection[ast.expr] = getattr(statement, "decorator_list", ())
    return min([statement.lineno, *(each.lineno for each in decorators)])


def _call(*arguments: int) -> ast.Call:
    return ast.Call(ast.Name(HOOK, ast.Load()), [ast.Constant(each) for each in arguments], [])


def _after_call(number: int, value: ast.expr) -> ast.expr:
    """``(call, value)[1]``: an expression that calls first."""
    both = ast.Tuple([_call(number), value], ast.Load())
    made = ast.Subscript(both, ast.Constant(1), ast.Load())
    return ast.fix_missing_locations(ast.copy_location(made, value))


def _at(made: ast.stmt, other: ast.stmt, line: int) -> ast.stmt:
    for node in ast.walk(made):
        if isinstance(node, ast.stmt | ast.expr):
            ast.copy_location(node, other)
            node.lineno, node.end_lineno = line, line
            node.end_col_offset = node.col_offset
    return made
