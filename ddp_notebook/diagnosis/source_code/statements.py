"""Statements around a line: which ones hold it, and how a loop goes without it or is left."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from ddp_notebook.diagnosis.source_code.conditions import EXITS, holds, last_name

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def hold(statements: list[ast.stmt], line: int) -> bool:
    """True when one of these statements holds a line."""
    return any(holds(statement, line) for statement in statements)


def blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """All lists of statements that follow one another, from the outermost on."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield block


def _bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements directly in a compound statement."""
    for name in ("body", "orelse", "finalbody"):
        inside = getattr(node, name, None)
        if isinstance(inside, list):
            yield inside
    for handler in getattr(node, "handlers", ()):
        yield handler.body
    for each in getattr(node, "cases", ()):
        yield each.body


def enclosing(statements: list[ast.stmt], line: int) -> Iterator[ast.stmt]:
    """The compound statements around a line, the outermost first."""
    for statement in statements:
        if holds(statement, line):
            bodies = [body for body in _bodies(statement) if body]
            if bodies:
                yield statement
                for body in bodies:
                    yield from enclosing(body, line)
            return


def functions_around(tree: ast.AST | None, line: int) -> Iterator[ast.AST]:
    """The innermost function around a line, and the lambdas in it."""
    nodes = [n for n in ast.walk(tree) if isinstance(n, _FUNCTIONS)] if tree else []
    around = [n for n in nodes if holds(n, line)]
    yield from (node for node in around if isinstance(node, ast.Lambda))
    named = [node for node in around if not isinstance(node, ast.Lambda)]
    if named:
        yield max(named, key=lambda node: node.lineno)


def call_at(tree: ast.Module | None, line: int, called: str) -> ast.Call | None:
    """The one call of a function or method of that name in a line; None for none or several."""
    calls = [
        node
        for node in (ast.walk(tree) if tree is not None else ())
        if isinstance(node, ast.Call) and holds(node, line) and last_name(node.func) == called
    ]
    return calls[0] if len(calls) == 1 else None


def targets_of(loop: ast.stmt) -> set[str]:
    """The names of a loop's own variables."""
    target = getattr(loop, "target", None)
    nodes = ast.walk(target) if target is not None else ()
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def ways_around(loop: ast.stmt, line: int) -> Iterator[tuple[ast.expr, int, bool]]:
    """The tests in a loop that decide whether `line` is reached, and their lines.

    True for those after which it is left for good.
    """
    true = ast.Constant(True)
    for node in ast.walk(loop):
        if isinstance(node, ast.If):
            inside = hold(node.body, line) or hold(node.orelse, line)
            leaves = any(map(_leaves, ast.walk(node)))
            continues = any(isinstance(child, ast.Continue) for child in ast.walk(node))
            if inside or leaves or continues:
                yield node.test, node.lineno, leaves and not (inside or continues)
        elif node is loop and isinstance(node, ast.While):
            yield node.test, node.lineno, True
        elif isinstance(node, ast.ExceptHandler) and not (
            hold(node.body, line) or _ends_inputs(node)
        ):
            # Whatever it catches, the rest of the iteration may go on without what raised.
            yield ast.Call(ast.Name("except"), [node.type or true], []), node.lineno, False


def _ends_inputs(handler: ast.ExceptHandler) -> bool:
    """True of ``except StopIteration: break``: what ends a loop over batches."""
    caught = handler.type is not None and last_name(handler.type) == "StopIteration"
    return caught and _leaves(handler.body[-1])


def _leaves(node: ast.AST) -> bool:
    """True of what leaves a loop: `break`, `return`, ``sys.exit()``."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return last_name(node.value.func) in EXITS
    return isinstance(node, (ast.Break, ast.Return))


def ways_out(loop: ast.stmt) -> Iterator[tuple[ast.expr, int, bool]]:
    """The tests that decide whether a loop is left, and their lines."""
    ahead = list(ast.iter_child_nodes(loop))
    while ahead:
        node = ahead.pop()
        if isinstance(node, ast.If) and any(map(_leaves, node.body)):
            yield node.test, node.lineno, True
        if not isinstance(node, (*LOOPS, *SCOPES)):
            ahead.extend(ast.iter_child_nodes(node))
    if isinstance(loop, ast.While) and any(isinstance(e, ast.Call) for e in ast.walk(loop.test)):
        yield loop.test, loop.lineno, True  # one that only counts epochs is the same on all ranks


def called_after(statements: list[ast.stmt], line: int) -> set[str]:
    """The names of what is called in these statements after `line`."""
    found = set()
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and node.lineno > line:
                func = node.func
                if isinstance(func, (ast.Attribute, ast.Name)):
                    found.add(func.attr if isinstance(func, ast.Attribute) else func.id)
    return found


def called_on(tree: ast.AST | None, lines: Collection[int]) -> set[str]:
    """The names of what is called on these lines."""
    nodes = ast.walk(tree) if tree else ()
    calls = (n for n in nodes if isinstance(n, ast.Call) and n.lineno in lines)
    return {last_name(call.func) for call in calls} - {""}


def imported_in(tree: ast.AST) -> set[str]:
    """The last parts of the names of modules that code imports, and of what it takes of them."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.update(alias.name.rpartition(".")[2] for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.rpartition(".")[2])
    return found
