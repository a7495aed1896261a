"""Random numbers that code draws for the samples of a batch, where a training step is made."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddp_notebook.diagnosis.source_code.conditions import holds, last_name
from ddp_notebook.diagnosis.source_code.sources import Sources
from ddp_notebook.model import Place

_DEEPEST = 3
"""Calls of the user's functions that are followed."""
_LIKE = frozenset({"rand_like", "randn_like", "randint_like", "bernoulli"})
_SHAPED = frozenset({"rand", "randn", "randint", "normal"})
_IN_PLACE = frozenset({"normal_", "uniform_", "bernoulli_", "random_", "exponential_"})
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def draw_around(sources: Sources, place: Place) -> str:
    """Return the call that draws numbers for the batch, with its line: ``a.py:3: rand_like(x)``.

    In the loop around `place` or a function of it, or else where a data set makes one sample on
    the rank itself: a loader's workers have generators of their own. Empty where there is none.
    """
    tree = sources.tree(place)
    call = None if tree is None else _in_loop(tree, place.line) or next(_in_samples(tree), None)
    return f"{Place(place.file, call.lineno)}: {ast.unparse(call)}" if call is not None else ""


def _in_loop(tree: ast.Module, line: int) -> ast.Call | None:
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)}
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (*_LOOPS, *_FUNCTIONS)) and holds(node, line)
    ]
    scope = max(around, key=lambda node: node.lineno, default=None)
    seen: set[str] = set()
    waiting: list[tuple[ast.AST, int]] = [(scope, 0)] if scope is not None else []
    while waiting:
        node, depth = waiting.pop(0)
        for call in (child for child in ast.walk(node) if isinstance(child, ast.Call)):
            if _is_per_sample(call):
                return call
            name = last_name(call.func)
            if name in functions and name not in seen and depth < _DEEPEST:
                seen.add(name)
                waiting.append((functions[name], depth + 1))
    return None


def _in_samples(tree: ast.Module) -> Iterator[ast.Call]:
    for function in ast.walk(tree):
        if isinstance(function, _FUNCTIONS) and function.name == "__getitem__":
            for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
                of, name = ast.unparse(call.func).rpartition(".")[0], last_name(call.func)
                shaped = of == "torch" and name in _SHAPED
                draws = shaped or name in _LIKE or (of and name in _IN_PLACE)
                if draws and not _has_generator(call):
                    yield call


def _is_per_sample(call: ast.Call) -> bool:
    name = last_name(call.func)
    if _has_generator(call):
        return False
    if name in _LIKE:
        return True
    if name in _IN_PLACE:
        return isinstance(call.func, ast.Attribute)
    return name in _SHAPED and any(_is_size(child) for arg in call.args for child in ast.walk(arg))


def _has_generator(call: ast.Call) -> bool:
    return any(keyword.arg == "generator" for keyword in call.keywords)


def _is_size(node: ast.AST) -> bool:
    """True of the size of something: ``len(x)``, ``x.shape[0]``, ``x.size(0)``."""
    if isinstance(node, ast.Call):
        return last_name(node.func) in ("len", "size")
    return isinstance(node, ast.Attribute) and node.attr == "shape"
