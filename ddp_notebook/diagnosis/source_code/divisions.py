"""What the code divides by what: a mean over ranks, a loss by their number.

By names alone, as in `shared_names.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Sequence

from ddp_notebook.diagnosis.source_code.conditions import holds, last_name
from ddp_notebook.diagnosis.source_code.shared_names import (
    SharedNames,
    given_in,
    names_in,
    parameters_of,
)
from ddp_notebook.diagnosis.source_code.sources import Sources
from ddp_notebook.diagnosis.source_code.statements import functions_around
from ddp_notebook.model import Place

_DIVIDING = ("div", "div_", "divide", "true_divide", "floor_divide")


def is_divisor(sources: Sources, path: Sequence[Place]) -> bool:
    """True when something is divided by what comes of the tensor that `path` reduces.

    Where that is a function's own argument, by what it is called with.
    """
    trees = sources.in_use(place.file for place in path)
    divisors = SharedNames(trees).read(divisors_in(trees))
    for place in reversed(path):
        tree = sources.tree(place)
        given = reduced_at(tree, place.line)
        function = next(functions_around(tree, place.line), None)
        if function is None or not is_argument(function, given):
            return not divisors.isdisjoint(given)
    return False


def divides_loss_by_world(sources: Sources, place: Place) -> bool:
    """True when what is given a backward at `place` was divided by the number of ranks."""
    names = SharedNames(sources.in_use([place.file]))
    divisors = _divisors_of_loss(names, sources.tree(place), place.line)
    return any(map(names.is_world_size, divisors))


def chooses_rate_by_world(sources: Sources, used: Collection[str]) -> bool:
    """True when a learning rate comes of the number of ranks.

    In the files `used` and those that they import; in any if none is given.
    """
    trees = sources.known(sources.imported_by(used)) or sources.known()
    nodes = (node for tree in trees for node in ast.walk(tree))
    rates = (n.value for n in nodes if isinstance(n, ast.keyword) and n.arg == "lr")
    return "get_world_size" in SharedNames(trees).read(rates)


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


def results(made: ast.AST, wanted: Collection[int] | None = None) -> Iterator[ast.AST]:
    """What a function returns, and what it makes that of; or the value of an attribute.

    Of several results those that are wanted, None for all.
    """
    if isinstance(made, ast.expr):
        yield made
        return
    nodes = list(ast.walk(made))
    results = [each for node in nodes for each in _returned(node, wanted)]
    yield from results
    names = {name for result in results for name in names_in(result)}
    yield from (node for node in nodes if any(name in names for name, _ in given_in(node)))


def plain_at(tree: ast.AST | None, line: int) -> Iterator[ast.stmt]:
    """The statements in a line, without those around them."""
    nodes = [child for child in ast.walk(tree) if isinstance(child, ast.stmt)] if tree else []
    for node in nodes:
        if not hasattr(node, "body") and holds(node, line):
            yield node


def reduced_at(tree: ast.AST | None, line: int, called: str = "") -> set[str]:
    """What the calls in a line, or those of one function, are given, and their result's name."""
    found: set[str] = set()
    for node in plain_at(tree, line):
        calls = [child for child in ast.walk(node) if isinstance(child, ast.Call)]
        if called and called not in (last_name(call.func) for call in calls):
            continue
        found.update(
            name for call in calls for expression in call.args for name in names_in(expression)
        )
        found.update(name for name, _ in given_in(node))
    return found - {"self"}


def is_argument(function: ast.AST, names: Collection[str]) -> bool:
    """True when one of these is an argument of the function, or is made of one in it."""
    made_of = SharedNames([function]).read(ast.Name(name) for name in names)
    return not made_of.isdisjoint(parameters_of(function) - {"cls"})


def _returned(node: ast.AST, wanted: Collection[int] | None) -> list[ast.expr]:
    match node:
        case ast.Return(value=ast.Tuple(elts=elements)):
            return [each for i, each in enumerate(elements) if wanted is None or i in wanted]
        case ast.Return(value=ast.expr() as value):
            return [value]
    return []


def _divisors_of_loss(
    names_of: SharedNames, tree: ast.Module | None, line: int
) -> Iterator[ast.AST]:
    """What the loss of the backward in a line was divided by, there, before it or in a function.

    Not afterwards: what is logged is divided, too.
    """
    plain = list(plain_at(tree, line))
    names = _given_a_backward(plain)
    function = next(functions_around(tree, line), tree)
    before = [
        node
        for node in (ast.walk(function) if function is not None and names else ())
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.lineno <= line
    ]
    given = [node for node in before if not names.isdisjoint(name for name, _ in given_in(node))]
    ahead: list[ast.AST] = [*given, *(plain if names else ())]
    yield from divisors_in(ahead)
    made = (each for child in names_of.called_in(ahead) for each in results(child))
    yield from divisors_in(made)


def _given_a_backward(plain: Iterable[ast.AST]) -> set[str]:
    calls = [node for child in plain for node in ast.walk(child) if isinstance(node, ast.Call)]
    return {name for call in calls if last_name(call.func) == "backward" for name in names_in(call)}
