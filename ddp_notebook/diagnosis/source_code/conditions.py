"""The code around a line: tests on the way to it, loops that go without it or end.

The tests that decide whether a line is reached come nearest first.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
_SCOPES = (*SCOPES, ast.Lambda)
_LEAVES = (ast.Return, ast.Continue, ast.Break, ast.Raise)
EXITS = ("exit", "_exit", "quit", "abort")
"""Functions that end the process."""
_ENDS = (ast.Return, ast.Break, ast.Raise)
_FOR_SOME = re.compile(r"only|rank|main_process|is_main|master", re.IGNORECASE)
"""Names of decorators that have a function run on some ranks."""
_BODIES = ("body", "orelse", "finalbody")
_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


@dataclass(frozen=True)
class Test:
    """A test on the way to a line, which is reached where it is `wanted`.

    `shown` is how it is quoted, empty for the text of its own line. With `filters` it leaves out
    turns of a loop: it is the filter of a comprehension. Who meets a test that `leaves` goes out
    of the function, or the loop; with `handles` it is no test but an `except` that does so.
    """

    test: ast.expr = field(compare=False)
    line: int
    wanted: bool = True
    shown: str = ""
    filters: bool = False
    leaves: bool = False
    handles: bool = False


def shallow(tree: ast.Module) -> ast.Module:
    """`tree`. Raises ValueError where it is nested so deep that to look at it would fail.

    No such code is written by hand, but a received file may contain it.
    """
    level: list[ast.AST] = [tree]
    for _ in range(150):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return tree
    raise ValueError("it is nested too deep")


def tests_around(tree: ast.Module, line: int, called: str, function: str = "") -> Iterator[Test]:
    """Yield the tests on the way to the call of `called` in `line`, the nearest first.

    Within the function that the line is in: what stands around it, in an expression too, and
    what leads out of the function or the loop before. In a lambda, what stands around that is
    not asked when it is called.
    """
    # One line may hold several calls, each behind a test of its own, such as `a() if x else b()`:
    # so the way leads to the call of that name, and only without one to the statement.
    chain: list[ast.AST] = [tree]
    ahead = [chain]
    while ahead:
        way = ahead.pop()
        if isinstance(call := way[-1], ast.Call) and last_name(call.func) == called:
            chain = way
            break
        if isinstance(way[-1], _STATEMENTS):
            chain = max(chain, way, key=len)
        below = [child for child in ast.iter_child_nodes(way[-1]) if holds(child, line)]
        ahead += [[*way, child] for child in reversed(below)]
    if function == "<lambda>" and not any(isinstance(node, ast.Lambda) for node in chain):
        return  # what it calls has another name there, such as that of a property
    scopes = [index for index, node in enumerate(chain) if isinstance(node, _SCOPES)]
    chain = chain[scopes[-1] :] if scopes else chain
    for parent, child in reversed(list(pairwise(chain))):
        yield from _before(parent, child)
        match parent:  # what it asks before it goes on to the child
            case ast.If(test=test) | ast.IfExp(test=test) if child is not test:
                shown = f"if {ast.unparse(test)}"
                if child not in (parent.body if isinstance(parent, ast.If) else [parent.body]):
                    yield Test(test, parent.lineno, wanted=False, shown=f"else of {shown}")
                elif isinstance(parent, ast.If):
                    yield Test(test, parent.lineno)  # quoted by its own line
                else:
                    yield Test(test, parent.lineno, shown=shown)
            case ast.BoolOp() if isinstance(child, ast.expr) and (i := parent.values.index(child)):
                first = parent.values[0] if i == 1 else ast.BoolOp(parent.op, parent.values[:i])
                yes = isinstance(parent.op, ast.And)
                shown = f"{ast.unparse(first)} {'and' if yes else 'or'} …"
                yield Test(first, parent.lineno, yes, shown)
            case ast.Match(subject=subject) if isinstance(child, ast.match_case):
                asked: ast.expr = ast.Call(ast.Name("match"), [subject], [])
                if isinstance(child.pattern, ast.MatchValue) and child.guard is None:
                    asked = ast.Compare(subject, [ast.Eq()], [child.pattern.value])
                shown = f"match {ast.unparse(subject)}: case {ast.unparse(child.pattern)}"
                yield Test(asked, child.pattern.lineno, shown=shown)
            case ast.ExceptHandler():
                yield Test(ast.Call(ast.Name("except"), [], []), parent.lineno)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                for test in reversed([test for each in parent.generators for test in each.ifs]):
                    yield Test(test, test.lineno, shown=f"if {ast.unparse(test)}", filters=True)
            case ast.FunctionDef() | ast.AsyncFunctionDef() if child in parent.body:
                for decorator in parent.decorator_list:
                    if _FOR_SOME.search(text := ast.unparse(decorator)):
                        yield Test(decorator, decorator.lineno, shown=f"@{text}")


def holds(node: ast.AST, line: int) -> bool:
    """True when a piece of code begins at or before a line, and ends there or after it."""
    if isinstance(node, ast.match_case):
        return any(holds(statement, line) for statement in node.body)
    first = getattr(node, "lineno", None)
    return first is not None and first <= line <= (getattr(node, "end_lineno", None) or first)


def last_name(func: ast.AST) -> str:
    """``get_rank`` of ``dist.get_rank``."""
    return getattr(func, "attr", "") or getattr(func, "id", "")


def _before(parent: ast.AST, child: ast.AST) -> Iterator[Test]:
    """Yield the ways out of a list before `child`: ``if rank != 0: return``, an `except`."""
    for name in _BODIES:
        body = getattr(parent, name, None)
        if not isinstance(body, list) or child not in body:
            continue
        for other in reversed(body[: body.index(child)]):
            # Only where the last statement leaves: then all that pass this test are gone. What may
            # leave deeper inside has a test of its own, which does not stand before the line.
            if isinstance(other, ast.If) and (how := _leaves(other.body[-1])):
                shown = f"if {ast.unparse(other.test)}: {how}"
                yield Test(other.test, other.lineno, wanted=False, shown=shown, leaves=True)
            for handler in getattr(other, "handlers", ()):
                # Who raises the error again has failed, which is known without the code.
                how = _leaves(handler.body[-1])
                if how not in ("", "raise") and not _catches_the_end(handler):
                    caught = list(filter(None, [handler.type]))
                    yield Test(
                        ast.Call(ast.Name("except"), [*caught], []),
                        handler.lineno,
                        wanted=False,
                        shown=f"{' '.join(['except', *map(ast.unparse, caught)])}: {how}",
                        leaves=True,
                        handles=True,
                    )


def _leaves(statement: ast.stmt) -> str:
    """How a statement leads out of what it is in: ``return``, ``sys.exit()``; empty for none."""
    if isinstance(statement, _LEAVES):
        return type(statement).__name__.lower()
    if isinstance(statement, ast.Expr) and isinstance(call := statement.value, ast.Call):
        return f"{ast.unparse(call.func)}()" if last_name(call.func) in EXITS else ""
    return ""


def retry_handler(loop: ast.For | ast.AsyncFor | ast.While, line: int) -> ast.ExceptHandler | None:
    """The handler after which a loop runs `line` again; the loop ends once that has succeeded."""
    for node in ast.walk(loop):
        if not isinstance(node, ast.Try) or not hold(node.body, line):
            continue
        # That the loop ends once it has worked makes it a retry. Without that it is a loop over
        # batches in which an error is passed over, and each turn is meant to be made.
        after = loop.body[loop.body.index(node) + 1 :] if node in loop.body else []
        done = [*node.body, *node.orelse, *after]
        if any(isinstance(statement, (ast.Return, ast.Break)) for statement in done):
            return _handler_that_goes_on(node)
    return None


def passing_handler(
    loop: ast.For | ast.AsyncFor | ast.While, line: int
) -> ast.ExceptHandler | None:
    """The handler after which a loop takes its next turn, though `line` has raised."""
    for node in ast.walk(loop):
        if isinstance(node, ast.Try) and hold(node.body, line):
            return _handler_that_goes_on(node)
    return None


def _handler_that_goes_on(node: ast.Try) -> ast.ExceptHandler | None:
    return next((h for h in node.handlers if not isinstance(h.body[-1], _ENDS)), None)


# -- statements --------------------------------------------------------------------------
# Statements around a line: which ones hold it, and how a loop goes without it or is left.


def hold(statements: list[ast.stmt], line: int) -> bool:
    """True when one of these statements holds a line."""
    return any(holds(statement, line) for statement in statements)


def enclosing(statements: list[ast.stmt], line: int) -> Iterator[ast.stmt]:
    """The compound statements around a line, the outermost first."""
    for statement in statements:
        if holds(statement, line):
            parts = (
                *(statement, *getattr(statement, "handlers", ())),
                *getattr(statement, "cases", ()),
            )
            bodies = [getattr(p, name, []) for p in parts for name in _BODIES]
            if any(bodies):
                yield statement
                for body in bodies:
                    yield from enclosing(body, line)
            return


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
            # Where the line stands in the `if`, or the turn may go on without it, the test is about
            # one turn, and who passed the line over may come to it in the next.
            inside = hold(node.body, line) or hold(node.orelse, line)
            leaves = any(map(_leaves_loop, ast.walk(node)))
            continues = any(isinstance(child, ast.Continue) for child in ast.walk(node))
            if inside or leaves or continues:
                yield node.test, node.lineno, leaves and not (inside or continues)
        elif node is loop and isinstance(node, ast.While):
            yield node.test, node.lineno, True
        elif isinstance(node, ast.ExceptHandler):
            # Whatever it catches, the rest of the iteration may go on without what raised. Not with
            # `except StopIteration: break`, by which a loop over batches ends.
            ends = _catches_the_end(node) and _leaves_loop(node.body[-1])
            if not ends and not hold(node.body, line):
                yield ast.Call(ast.Name("except"), [node.type or true], []), node.lineno, False


def _catches_the_end(handler: ast.ExceptHandler) -> bool:
    """True of ``except StopIteration``: there were no more batches."""
    return handler.type is not None and last_name(handler.type) == "StopIteration"


def _leaves_loop(node: ast.AST) -> bool:
    """True of what leaves a loop: `break`, `return`, ``sys.exit()``."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return last_name(node.value.func) in EXITS
    return isinstance(node, (ast.Break, ast.Return))


def ways_out(loop: ast.stmt) -> Iterator[tuple[ast.expr, int, bool]]:
    """The tests that decide whether a loop is left, and their lines."""
    ahead = list(ast.iter_child_nodes(loop))
    while ahead:
        node = ahead.pop()
        if isinstance(node, ast.If) and any(map(_leaves_loop, node.body)):
            yield node.test, node.lineno, True
        # Not into loops and functions inside: a `break` or `return` there is mostly theirs.
        if not isinstance(node, (*LOOPS, *SCOPES)):
            ahead.extend(ast.iter_child_nodes(node))
    if isinstance(loop, ast.While) and any(isinstance(e, ast.Call) for e in ast.walk(loop.test)):
        yield loop.test, loop.lineno, True  # one that only counts epochs is the same on all ranks


def called_after(statements: list[ast.stmt], line: int) -> set[str]:
    """The names of what is called in these statements after `line`."""
    nodes = (node for statement in statements for node in ast.walk(statement))
    calls = (n for n in nodes if isinstance(n, ast.Call) and n.lineno > line)
    return {last_name(call.func) for call in calls} - {""}


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
