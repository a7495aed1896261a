"""What code writes and other code hangs on: does what a thread left undone decide a test?

By names alone, over all of the user's files: a name stands for what it was ever given, and a call
for what the function of that name does. So that two pieces of code have a name in common shows
that they may well belong together; that they have none shows that they do not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from ddp_notebook.diagnosis.source_code.conditions import last_name

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
            for name, value in given_in(node):
                self._given.setdefault(name, []).append(value)

    def written(self, code: Iterable[ast.AST]) -> set[str]:
        """What functions change that others may see, and the functions that they call.

        Of what the code gives a value somewhere: a name of another cell may be that of a module.
        """
        found: set[str] = set()
        for function in self.reached_from(code):
            changed = set(_changed_in(function))
            own = _own_names(function)
            given = changed & parameters_of(function)
            found |= changed - own - self._imported
            if given and isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found |= self._passed_to(function.name)
        return found & self._given.keys()

    def read(self, tests: Iterable[ast.AST]) -> set[str]:
        """What tests hang on, however indirectly."""
        found: set[str] = set()
        ahead = [name for test in tests for name in names_in(test)]
        while ahead:
            name = ahead.pop()
            if name in found or name in self._imported:
                continue
            found.add(name)
            for node in (*self._given.get(name, ()), *self._functions.get(name, ())):
                ahead.extend(names_in(node))
        return found

    def reached_from(self, code: Iterable[ast.AST]) -> list[ast.AST]:
        """These pieces of code, and those of the user's functions that they call."""
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
                if function in {last_name(expression) for expression in (node.func, *arguments)}:
                    found.update(name for expression in arguments for name in names_in(expression))
        return found - self._imported - {function}


def names_in(node: ast.AST) -> Iterator[str]:
    """The names and attributes in a piece of code."""
    for child in ast.walk(node):
        if isinstance(child, ast.Name):
            yield child.id
        elif isinstance(child, ast.Attribute):
            yield child.attr


def given_in(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The names that get a value here, and what it is made of."""
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    value = getattr(node, "value", None) or getattr(node, "iter", None)
    for child in (child for target in targets if target is not None for child in ast.walk(target)):
        name = last_name(child) if isinstance(getattr(child, "ctx", None), ast.Store) else ""
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
    return (stored | parameters_of(function)) - shared - attributes


def parameters_of(function: ast.AST) -> set[str]:
    """The names of its arguments, and of those of functions in it; without `self`."""
    return {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)} - {"self"}
