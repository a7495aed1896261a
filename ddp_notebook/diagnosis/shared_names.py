"""What code writes and other code hangs on: does what a thread left undone decide a test?

By names alone, over all of the user's files: a name stands for what it was ever given, and a call
for what the function of that name does. So that two pieces of code have a name in common shows
that they may well belong together; that they have none shows that they do not.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Container, Iterable, Iterator

from ddp_notebook.diagnosis.conditions import last_name

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_DIVIDING = ("div", "div_", "divide", "true_divide", "floor_divide")
_OF_WORLD = frozenset({"get_world_size", "world_size", "WORLD_SIZE"})
_CHANGES = (ast.Store, ast.Del)


class SharedNames:
    """The user's code as names that are written and read."""

    def __init__(self, trees: Iterable[ast.AST]) -> None:
        self._nodes = [node for tree in trees for node in ast.walk(tree)]
        self._imported = {"self", "cls"}
        self._functions: dict[str, list[ast.AST]] = {}
        self._given: dict[str, list[ast.AST]] = {}
        for node in self._nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self._imported.update((a.asname or a.name).split(".")[0] for a in node.names)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self._functions.setdefault(node.name, []).append(node)
            for name, value in _given_in(node):
                self._given.setdefault(name, []).append(value)

    def written(self, code: Iterable[ast.AST]) -> set[str]:
        """What functions change that others may see, and the functions that they call.

        Of what the code gives a value somewhere: a name of another cell may be that of a module.
        """
        found: set[str] = set()
        for function in self._called(code):
            changed = set(_changed_in(function))
            own = _own_names(function)
            given = changed & _parameters(function)
            found |= changed - own - self._imported
            if given and isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found |= self._passed_to(function.name)
        return found & self._given.keys()

    def read(self, tests: Iterable[ast.AST]) -> set[str]:
        """What tests hang on, however indirectly."""
        found: set[str] = set()
        ahead = [name for test in tests for name in _names(test)]
        while ahead:
            name = ahead.pop()
            if name in found or name in self._imported:
                continue
            found.add(name)
            for node in (*self._given.get(name, ()), *self._functions.get(name, ())):
                ahead.extend(_names(node))
        return found

    def is_world_size(self, node: ast.AST) -> bool:
        """True of the number of ranks, or a name that was given it."""
        names = set(_names(node))
        if names & _OF_WORLD or not isinstance(node, (ast.Name, ast.Attribute)):
            return bool(names & _OF_WORLD)
        given = self._given.get(last_name(node), ())
        return any(not _OF_WORLD.isdisjoint(_names(value)) for value in given)

    def are_imported(self, names: Collection[str]) -> set[str]:
        """Those of these names that an import gives."""
        return self._imported & set(names)

    def _called(self, code: Iterable[ast.AST]) -> list[ast.AST]:
        """These functions, and those of the user's that they call."""
        found: list[ast.AST] = []
        ahead = list(code)
        while ahead:
            function = ahead.pop()
            if function not in found:
                found.append(function)
                calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
                for call in calls:
                    ahead.extend(self._functions.get(last_name(call.func), ()))
        return found

    def _passed_to(self, function: str) -> set[str]:
        """What is given to a function where it is called, or handed on to be: `Thread(target=)`."""
        found: set[str] = set()
        for node in self._nodes:
            if isinstance(node, ast.Call):
                arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
                if function in {last_name(each) for each in (node.func, *arguments)}:
                    found.update(name for each in arguments for name in _names(each))
        return found - self._imported - {function}


def functions_around(tree: ast.AST | None, line: int) -> Iterator[ast.AST]:
    """The innermost function around a line, and the lambdas in it."""
    nodes = [n for n in ast.walk(tree) if isinstance(n, _FUNCTIONS)] if tree else []
    around = [n for n in nodes if n.lineno <= line <= (n.end_lineno or n.lineno)]
    yield from (node for node in around if isinstance(node, ast.Lambda))
    named = [node for node in around if not isinstance(node, ast.Lambda)]
    if named:
        yield max(named, key=lambda node: node.lineno)


def tried_before(tree: ast.AST | None, lines: Collection[int]) -> Iterator[ast.AST]:
    """What is tried before the handlers at these lines."""
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.Try) and any(each.lineno in lines for each in node.handlers):
            yield from node.body


def divisors_in(trees: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """What anything is divided by."""
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.BinOp(op=ast.Div() | ast.FloorDiv(), right=divisor):
                yield divisor
            case ast.AugAssign(op=ast.Div() | ast.FloorDiv(), value=divisor):
                yield divisor
            case ast.Call(func=func, args=[*_, divisor]) if last_name(func) in _DIVIDING:
                yield divisor


def divided_in(function: ast.AST | None, names: Container[str]) -> Iterator[ast.AST]:
    """By what these names are divided in a function, or what they are made of is.

    A mean divides, too: it stands for the number of what it is taken of.
    """
    for node in ast.walk(function) if function is not None else ():
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):
            named = [*(name for name, _ in _given_in(node)), *_names(node)]
            if any(name in names for name in named):
                yield from divisors_in([node])
                yield from _means_in(node)


def _means_in(node: ast.AST) -> Iterator[ast.Call]:
    for each in ast.walk(node):
        match each:
            case ast.Call(func=ast.Attribute(attr="mean")):
                yield each


def divisors_of_loss(tree: ast.Module | None, line: int) -> Iterator[ast.AST]:
    """What the loss of the backward in a line was divided by, there or before it.

    Not afterwards: what is logged is divided, too.
    """
    plain = list(_plain_at(tree, line))
    calls = [node for each in plain for node in ast.walk(each) if isinstance(node, ast.Call)]
    names = {name for call in calls if last_name(call.func) == "backward" for name in _names(call)}
    function = next(functions_around(tree, line), tree)
    before = [
        node
        for node in (ast.walk(function) if function is not None and names else ())
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.lineno <= line
    ]
    given = [node for node in before if not names.isdisjoint(name for name, _ in _given_in(node))]
    yield from divisors_in([*given, *(plain if names else ())])


def given_at(tree: ast.AST | None, line: int) -> set[str]:
    """The names that get a value in a line, or one more value: ``losses.append(...)``."""
    plain = list(_plain_at(tree, line))
    return {name for node in plain for name, _ in _given_in(node)}.union(map(_extended, plain)) - {
        ""
    }


def _extended(statement: ast.stmt) -> str:
    match statement:
        case ast.Expr(ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"))):
            return name
    return ""


def imported_in(tree: ast.AST) -> set[str]:
    """The last parts of the names of modules that code imports, and of what it takes of them."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.update(each.name.rpartition(".")[2] for each in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.rpartition(".")[2])
    return found


def reduced_at(tree: ast.AST | None, line: int, called: str = "") -> set[str]:
    """What the calls in a line, or those of one function, are given, and their result's name."""
    found: set[str] = set()
    for node in _plain_at(tree, line):
        calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
        if called and called not in (last_name(each.func) for each in calls):
            continue
        found.update(name for call in calls for each in call.args for name in _names(each))
        found.update(name for name, _ in _given_in(node))
    return found - {"self"}


def _plain_at(tree: ast.AST | None, line: int) -> Iterator[ast.stmt]:
    """The statements in a line, without those around them."""
    nodes = [each for each in ast.walk(tree) if isinstance(each, ast.stmt)] if tree else []
    for node in nodes:
        if not hasattr(node, "body") and node.lineno <= line <= (node.end_lineno or line):
            yield node


def is_argument(function: ast.AST, names: Collection[str]) -> bool:
    """True when one of these is an argument of the function, or is made of one in it."""
    made_of = SharedNames([function]).read(ast.Name(name) for name in names)
    return not made_of.isdisjoint(_parameters(function) - {"cls"})


def _names(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, ast.Attribute):
            yield each.attr


def _given_in(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The names that get a value here, and what it is made of."""
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    value = getattr(node, "value", None) or getattr(node, "iter", None)
    for each in (each for target in targets if target is not None for each in ast.walk(target)):
        name = last_name(each) if isinstance(getattr(each, "ctx", None), ast.Store) else ""
        if name and isinstance(value, ast.expr):
            yield name, value


def _changed_in(function: ast.AST) -> Iterator[str]:
    """What code sets, or calls a method of, which may change it."""
    for node in ast.walk(function):
        match node:
            case ast.Name(ctx=ast.Store()) | ast.Attribute(ctx=ast.Store()):
                yield last_name(node)
            case ast.Subscript(value=value, ctx=ctx) if isinstance(ctx, _CHANGES):
                yield last_name(value)
            case ast.Call(func=ast.Attribute(value=value)):
                yield last_name(value)


def _own_names(function: ast.AST) -> set[str]:
    """A function's own variables: nobody else sees them."""
    nodes = list(ast.walk(function))
    outer = [node for node in nodes if isinstance(node, (ast.Global, ast.Nonlocal))]
    shared = {name for node in outer for name in node.names}
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    attributes = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    return (stored | _parameters(function)) - shared - attributes


def _parameters(function: ast.AST) -> set[str]:
    return {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)} - {"self"}
