"""Source with calls of ours before the lines of breakpoints: no tracing, until one is hit."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

HOOK = "__ddp_line__"
"""The built-in function that such a call calls: with a number, and of a `for` loop where it is.

A breakpoint at the head of a loop stops in every round, as Python's own tracing does: `for` calls
before the loop and as each round begins, `while` in its test.
"""
ERROR = "__ddp_error__"
"""The built-in name for `Exception`, which the user's code may have for something else."""
BEFORE_LOOP, IN_ROUND = 1, 2
_WITHOUT_CODE = (ast.Global, ast.Nonlocal)
_WORD = re.compile(r"\w+")
_BODIES = ("body", "orelse", "finalbody")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_PLAIN = (
    *(ast.Expression, ast.Name, ast.Constant, ast.Attribute, ast.Subscript, ast.Compare),
    *(ast.BoolOp, ast.UnaryOp, ast.BinOp),
    *(ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)

Lines = Mapping[str, Mapping[int, str]]
"""By file, the lines of breakpoints, each with its plain condition: a thread for which that is
false need not be brought to the debugger. Empty where each pass is to be looked at."""
CallOf = Callable[[int], tuple[int, str] | None]
"""The number and the plain condition of the call in a line; None where there is none."""


def instrument(tree: ast.AST, call_of: CallOf) -> None:
    """Put the calls of lines into `tree`."""
    _Instrument(call_of).into(tree)


def plain(condition: str) -> str:
    """The condition in one line; empty where it calls something, or makes variables."""
    tree = ast.parse(condition.strip(), mode="eval")
    is_plain = "__" not in condition and all(isinstance(node, _PLAIN) for node in ast.walk(tree))
    return ast.unparse(tree) if is_plain else ""


def line_with_code(tree: ast.AST, wanted: int) -> int | None:
    """The line to stop at for a `wanted` one: of the statement that it is in, or the next one."""
    statements = (node for node in ast.walk(tree) if isinstance(node, ast.stmt))
    spans = [_span(node) for node in statements if not isinstance(node, _WITHOUT_CODE)]
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
    def __init__(self, call_of: CallOf) -> None:
        self._call_of = call_of
        self._global: set[str] = set()
        """Names that functions declare: none may be used before that, in a condition neither."""

    def into(self, tree: ast.AST) -> None:
        nodes = list(_with_depths(tree))
        for node, _ in nodes:
            self._global.update(node.names if isinstance(node, ast.Global) else ())
        for node, depth in nodes:
            # A condition in a function in a function would make a closure of variables that
            # were none, and neither could have the other's code.
            self._statements_in(node, nested=depth > 1)
            if isinstance(node, ast.Lambda):
                self._lambda(node)
            elif isinstance(node, ast.For | ast.AsyncFor | ast.While):
                self._each_round(node)

    def _statements_in(self, node: ast.AST, *, nested: bool) -> None:
        for name in _BODIES:
            body = getattr(node, name, None)
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                setattr(node, name, self._with_calls(node, name, body, nested))

    def _with_calls(
        self, owner: ast.AST, name: str, body: Sequence[ast.stmt], nested: bool
    ) -> list[ast.stmt]:
        begin = _after_what_must_be_first(owner, body) if name == "body" else 0
        made = list(body[:begin])
        placed: set[int] = set()
        for statement in body[begin:]:
            line = _first_line(statement)
            found = self._call_of(line)
            in_test = isinstance(statement, ast.While)
            if found is not None and line not in placed and not in_test:
                placed.add(line)
                made.append(_at(self._before(statement, *found, nested), statement, line))
            made.append(statement)
        return made

    def _before(self, statement: ast.stmt, number: int, condition: str, nested: bool) -> ast.stmt:
        """The call before a statement; where that can be, unless its condition is false."""
        if isinstance(statement, ast.For | ast.AsyncFor):
            return ast.Expr(_call(number, BEFORE_LOOP))
        call = ast.Expr(_call(number))
        is_free = not nested and self._global.isdisjoint(_WORD.findall(condition))
        return _unless_false(condition, call) if condition and is_free else call

    def _lambda(self, node: ast.Lambda) -> None:
        found = self._call_of(node.body.lineno)
        if found is not None:
            node.body = _after_call(found[0], node.body)

    def _each_round(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        found = self._call_of(node.lineno)
        if found is not None and isinstance(node, ast.While):
            node.test = _after_call(found[0], node.test)
        elif found is not None:
            node.body.insert(0, _at(ast.Expr(_call(found[0], IN_ROUND)), node, node.lineno))


def _with_depths(tree: ast.AST) -> Iterator[tuple[ast.AST, int]]:
    """All nodes, each with the number of functions that its statements are in.

    A class in a function counts as one: its body sees that function's variables.
    """
    waiting = [(tree, 0)]
    for node, depth in waiting:
        in_function = depth and isinstance(node, ast.ClassDef)
        depth += bool(in_function or isinstance(node, _FUNCTIONS))
        waiting.extend((child, depth) for child in ast.iter_child_nodes(node))
        yield node, depth


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
    return min([statement.lineno, *(expression.lineno for expression in decorators)])


def _call(*arguments: int) -> ast.Call:
    return ast.Call(
        ast.Name(HOOK, ast.Load()), [ast.Constant(argument) for argument in arguments], []
    )


def _unless_false(condition: str, call: ast.stmt) -> ast.stmt:
    """`call` where the condition is true, or raises: the debugger then says that it does.

    A loop of one round at most, which makes no variable and raises nothing of the condition's.
    """
    (made,) = ast.parse(
        f"while True:\n try:\n  if not ({condition}): break\n except {ERROR}: pass\n break"
    ).body
    assert isinstance(made, ast.While)
    made.body.insert(1, call)
    return made


def _after_call(number: int, value: ast.expr) -> ast.expr:
    """``(call, value)[1]``: an expression that calls first."""
    both = ast.Tuple([_call(number), value], ast.Load())
    made = ast.Subscript(both, ast.Constant(1), ast.Load())
    return ast.fix_missing_locations(ast.copy_location(made, value))


def _at(made: ast.stmt, other: ast.stmt, line: int) -> ast.stmt:
    for node in ast.walk(made):
        if isinstance(node, ast.stmt | ast.expr | ast.excepthandler):
            ast.copy_location(node, other)
            node.lineno, node.end_lineno = line, line
            node.end_col_offset = node.col_offset
    return made
