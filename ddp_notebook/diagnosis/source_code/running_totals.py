"""Sums that code adds to, sums over all ranks, and adds to again: each rank's part grows with it.

Only where all of that is seen in one function, or in one class: what may set such a sum anew, in
whatever way, ends the search.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

from ddp_notebook.diagnosis.source_code.conditions import holds, last_name
from ddp_notebook.diagnosis.source_code.sources import Sources
from ddp_notebook.diagnosis.source_code.statements import (
    LOOPS,
    blocks,
    call_at,
    functions_around,
)
from ddp_notebook.model import Place

_READS = frozenset(
    {"all_reduce", "print", "float", "int", "round", "len", "str", "append", "info", "isfinite"}
)
"""Functions that leave what they are given as it was; of `all_reduce` that is the point."""
_ADDS = frozenset({"add_"})
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LEAVES = (ast.Return, ast.Break, ast.Raise)
_REPEATS = (*LOOPS, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)
_DEEPEST = 8
"""Functions that call one another, of which each is to run once."""


def added_to_sum(sources: Sources, path: Sequence[Place]) -> tuple[str, int] | None:
    """What is summed over ranks again and again, as the code calls it, and the line of its `+=`.

    `path` leads to the all_reduce. None where it is not seen that nothing sets it anew.
    """
    trees = sources.in_use(place.file for place in path)
    called = "all_reduce"
    for place in reversed(path):
        tree = sources.tree(place)
        call = call_at(tree, place.line, called)
        if tree is None or call is None or not call.args:
            return None
        function = next(functions_around(tree, place.line), None)
        if not (isinstance(function, _FUNCTIONS) and _is_argument(function, call.args[0])):
            return _added_to(trees, tree, function, call)
        if not _is_first_alone(function, last_name(call.args[0]), call):
            return None
        called = function.name
    return None


def sums_again(sources: Sources) -> bool:
    """True where some all_reduce of the code may be one of a sum that it adds to."""
    trees = sources.known()
    nodes = [node for tree in trees for node in ast.walk(tree)]
    added = {last_name(t) for t in map(_added_by, nodes) if t is not None} - {""}
    given = {
        last_name(each)
        for node in nodes
        if isinstance(node, ast.Call) and last_name(node.func) != "print"
        for each in node.args[:1]
    }
    reduced = any(isinstance(n, ast.Call) and last_name(n.func) == "all_reduce" for n in nodes)
    return reduced and not added.isdisjoint(given)


def _added_to(
    trees: list[ast.Module], tree: ast.Module, function: ast.AST | None, call: ast.Call
) -> tuple[str, int] | None:
    match call.args[0]:
        case ast.Name(id=name):
            added = _in_loops(trees, tree, function or tree, call)
        case ast.Attribute(value=ast.Name(id="self"), attr=attribute):
            name, added = f"self.{attribute}", _in_class(trees, tree, call)
        case _:
            return None
    return (name, added) if added else None


def _is_argument(function: ast.FunctionDef | ast.AsyncFunctionDef, given: ast.expr) -> bool:
    return isinstance(given, ast.Name) and given.id in {
        each.arg for each in (*function.args.args, *function.args.kwonlyargs)
    }


def _is_first_alone(
    function: ast.FunctionDef | ast.AsyncFunctionDef, name: str, call: ast.Call
) -> bool:
    """True where what is reduced is a function's first argument, and stays what it is then."""
    first = [each.arg for each in function.args.args if each.arg != "self"][:1]
    others = (node for node in ast.walk(function) if node is not call)
    return first == [name] and not any(_set(others, name))


# -- a variable ------------------------------------------------------------------------------


def _in_loops(trees: list[ast.Module], tree: ast.Module, scope: ast.AST, call: ast.Call) -> int:
    """The line that adds to a variable in the innermost loop that has both; 0 for none."""
    name, line = last_name(call.args[0]), call.lineno
    loops = [n for n in ast.walk(scope) if isinstance(n, LOOPS) and holds(n, line)]
    for loop in sorted(loops, key=lambda each: -each.lineno):
        nodes = [node for node in ast.walk(loop) if node is not call]
        if any(_set(nodes, name)):
            return 0
        if added := _first_that_adds(nodes, name):
            often = not _at_times(loop, line) or _set_once(trees, tree, scope, call)
            return added if often and not _is_left(loop, line) else 0
    return 0


def _first_that_adds(nodes: Iterable[ast.AST], name: str) -> int:
    return min((_line_of(node) for node in nodes if _adds(node, name)), default=0)


def _at_times(loop: ast.stmt, line: int) -> bool:
    """True where not every turn of the loop comes to a line: once per epoch, perhaps."""
    return any(
        isinstance(n, (ast.If, ast.Try, ast.Match)) and holds(n, line) for n in ast.walk(loop)
    )


def _set_once(trees: list[ast.Module], tree: ast.Module, scope: ast.AST, call: ast.Call) -> bool:
    name = last_name(call.args[0])
    lines = [_line_of(node) for node in _set((n for n in ast.walk(scope) if n is not call), name)]
    return all(_runs_once(tree, line, trees, _DEEPEST) for line in lines)


def _is_left(loop: ast.stmt, line: int) -> bool:
    """True where the statements around the all_reduce end the loop."""
    return any(
        any(holds(statement, line) for statement in block)
        and any(isinstance(n, _LEAVES) for s in block if s.lineno >= line for n in ast.walk(s))
        for block in blocks(loop)
    )


# -- an attribute -----------------------------------------------------------------------------


def _in_class(trees: list[ast.Module], tree: ast.Module, call: ast.Call) -> int:
    """The line that adds to an attribute of an object that is made once; 0 for none."""
    attribute, line = last_name(call.args[0]), call.lineno
    classes = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and holds(n, line)]
    if len(classes) != 1 or not _is_made_once(classes[0].name, trees):
        return 0
    made = {n for f in classes[0].body if _is_init(f) for n in ast.walk(f)} | {call}
    others = [n for each in trees for n in ast.walk(each) if n not in made]
    return 0 if any(_set(others, attribute)) else _first_that_adds(others, attribute)


def _is_init(node: ast.stmt) -> bool:
    return isinstance(node, _FUNCTIONS) and node.name == "__init__"


def _is_made_once(name: str, trees: list[ast.Module]) -> bool:
    calls = list(_calls_of(name, trees))
    return len(calls) == 1 and _runs_once(calls[0][0], calls[0][1].lineno, trees, _DEEPEST)


def _runs_once(tree: ast.Module, line: int, trees: list[ast.Module], deepest: int) -> bool:
    """True where a line is in no loop, and the function around it, if any, is called so once."""
    if any(isinstance(n, _REPEATS) and holds(n, line) for n in ast.walk(tree)):
        return False
    function = next(functions_around(tree, line), None)
    if function is None:
        return True
    if not isinstance(function, _FUNCTIONS) or deepest == 0:
        return False
    calls = list(_calls_of(function.name, trees))
    return len(calls) == 1 and _runs_once(calls[0][0], calls[0][1].lineno, trees, deepest - 1)


def _calls_of(name: str, trees: Iterable[ast.Module]) -> Iterator[tuple[ast.Module, ast.Call]]:
    """The calls of a function or class; also those that are handed it: ``spawn(main)``."""
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                given = (node.func, *node.args, *(k.value for k in node.keywords))
                if any(last_name(each) == name for each in given):
                    yield tree, node


# -- what a node does with it -------------------------------------------------------------------


def _adds(node: ast.AST, name: str) -> bool:
    target = _added_by(node)
    return target is not None and _is(target, name)


def _added_by(node: ast.AST) -> ast.expr | None:
    """What a node adds something to."""
    match node:
        case ast.AugAssign(target=target, op=ast.Add()):
            return target
        case ast.Assign(targets=[target], value=ast.BinOp(left=left, op=ast.Add(), right=right)):
            name = last_name(target)
            return target if _is(left, name) or _is(right, name) else None
        case ast.Call(func=ast.Attribute(value=value, attr=method)) if method in _ADDS:
            return value
    return None


def _set(nodes: Iterable[ast.AST], name: str) -> Iterator[ast.AST]:
    """The nodes that may give it another value than its own and something more."""
    every = list(nodes)
    added = {target for target in map(_added_by, every) if target is not None}
    return (node for node in every if node not in added and _may_set(node, name))


def _may_set(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Global(names=names) | ast.Nonlocal(names=names):
            return name in names
        case ast.Call():
            return _may_change(node, name)
    return isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)) and _names(node, name)


def _may_change(call: ast.Call, name: str) -> bool:
    """True of a call that has it in hand: `zero_()`, a function that is given it, `setattr`."""
    called = last_name(call.func)
    own = call.func.value if isinstance(call.func, ast.Attribute) else None
    if own is not None and _is(own, name):
        return called.endswith("_") and called not in _ADDS
    given = (*call.args, *(each.value for each in call.keywords))
    return called == "setattr" or (called not in _READS and any(_is(each, name) for each in given))


def _is(node: ast.AST, name: str) -> bool:
    """True of the variable, or of the attribute of whatever object."""
    return isinstance(node, (ast.Name, ast.Attribute)) and last_name(node) == name


def _names(target: ast.AST, name: str) -> bool:
    return any(_is(child, name) for child in ast.walk(target))


def _line_of(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 0))
