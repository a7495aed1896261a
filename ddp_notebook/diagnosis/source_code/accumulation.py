"""Gradient accumulation as code counts it: a step, and cleared gradients, every n micro-batches."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from ddp_notebook.diagnosis.source_code.conditions import last_name
from ddp_notebook.diagnosis.source_code.divisions import divisors_in
from ddp_notebook.diagnosis.source_code.shared_names import given_in
from ddp_notebook.diagnosis.source_code.sources import Sources


def undivided_count(sources: Sources, files: Iterable[str], backwards: int) -> str:
    """How the code counts to `backwards` before a step: ``(i + 1) % steps == 0``, by its text.

    Empty where it counts in no such way, or where anything at all is divided by that number:
    a loss, gradients, a learning rate.
    """
    trees = sources.known(sources.imported_by(set(files)))
    divisors = list(divisors_in(trees))
    for test in (test for tree in trees for test in _tests_of_steps(tree)):
        counts = list(_moduli(test))
        if len(counts) == 1 and not _is_divided_by(counts[0], divisors, trees, backwards):
            return ast.unparse(test)
    return ""


def _tests_of_steps(tree: ast.AST) -> Iterator[ast.expr]:
    """The tests by a remainder that decide whether a step is made and gradients are cleared."""
    named = {
        name: value
        for node in ast.walk(tree)
        for name, value in given_in(node)
        if isinstance(value, ast.Compare)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and _calls(node, "step") and _calls(node, "zero_grad"):
            test = named.get(last_name(node.test), node.test)
            if any(isinstance(child, ast.Mod) for child in ast.walk(test)):
                yield test


def _moduli(test: ast.expr) -> Iterator[ast.expr]:
    for node in ast.walk(test):
        match node:
            case ast.BinOp(op=ast.Mod(), right=right):
                yield right


def _is_divided_by(
    count: ast.expr, divisors: list[ast.AST], trees: list[ast.Module], backwards: int
) -> bool:
    """True where something is divided by the count, or where it is another number."""
    if isinstance(count, ast.Constant):
        literal = count.value
        same = any(isinstance(d, ast.Constant) and d.value == literal for d in divisors)
        return same or literal != backwards
    names = _aliases(set(_leaves(count)), trees)
    values = {d.value for d in divisors if isinstance(d, ast.Constant)}
    return backwards in values or not names.isdisjoint(n for d in divisors for n in _leaves(d))


def _aliases(names: set[str], trees: list[ast.Module]) -> set[str]:
    """These names, and those that only stand for them, or they for those."""
    pairs = [
        (name, last_name(value))
        for tree in trees
        for node in ast.walk(tree)
        for name, value in (*given_in(node), *_keywords_of(node))
        if last_name(value)
    ]
    before = 0
    while len(names) > before:
        before = len(names)
        names = names.union(*(pair for pair in pairs if not names.isdisjoint(pair)))
    return names


def _keywords_of(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    for argument in node.keywords if isinstance(node, ast.Call) else ():
        if argument.arg:
            yield argument.arg, argument.value


def _leaves(node: ast.AST) -> Iterator[str]:
    """The names in an expression, of ``a.b`` only ``b``."""
    if isinstance(node, ast.Name | ast.Attribute):
        yield last_name(node)
        return
    for child in ast.iter_child_nodes(node):
        yield from _leaves(child)


def _calls(node: ast.If, name: str) -> bool:
    calls = [n for statement in node.body for n in ast.walk(statement) if isinstance(n, ast.Call)]
    return any(last_name(call.func) == name for call in calls)
