"""The exp or the root of each rank's own mean, averaged over the ranks: a perplexity, an RMSE.

Only where all of it is seen: the two sums that a loop of the same function adds to, their ratio,
the function of it, the all_reduce, and the division by the number of ranks.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

from ddp_notebook.diagnosis.source_code.conditions import last_name
from ddp_notebook.diagnosis.source_code.shared_names import SharedNames, given_in, names_in
from ddp_notebook.diagnosis.source_code.sources import Sources
from ddp_notebook.diagnosis.source_code.statements import LOOPS, call_at, functions_around
from ddp_notebook.model import Place

_CURVED = frozenset({"exp", "sqrt"})
_OF_CELLS = frozenset({"torch", "device"})
"""What an earlier cell has imported or set."""
_JOINS = frozenset({"all_reduce", "reduce", "all_gather", "all_gather_object", "gather"})
_DIVIDES = frozenset({"div", "div_", "divide", "true_divide"})


def curved_mean(sources: Sources, path: Sequence[Place]) -> tuple[str, str] | None:
    """Of what `path` reduces: the function of a rank's own mean, as written, and that mean.

    None where the code does not show all of it.
    """
    names = SharedNames(sources.in_use(place.file for place in path))
    called, averages = "all_reduce", False
    for place in reversed(path):
        tree = sources.tree(place)
        call = call_at(tree, place.line, called)
        function = next(functions_around(tree, place.line), tree)
        if call is None or function is None or not call.args:
            return None
        given = call.args[0]
        averages |= _is_averaged(names, function, last_name(given) or called)
        if not isinstance(function, ast.FunctionDef) or not _is_first(function, given):
            return _of_own_mean(names, function, given) if averages else None
        called = function.name
    return None


def _is_first(function: ast.FunctionDef, given: ast.expr) -> bool:
    first = [each.arg for each in function.args.args if each.arg != "self"][:1]
    return isinstance(given, ast.Name) and first == [given.id]


def _of_own_mean(names: SharedNames, function: ast.AST, given: ast.expr) -> tuple[str, str] | None:
    nodes = list(ast.walk(function))
    values: dict[str, list[ast.AST]] = {}
    for node in (each for each in nodes if not isinstance(each, ast.AugAssign)):
        for name, value in given_in(node):
            values.setdefault(name, []).append(value)
    begun = {name for name, of in values.items() if all(_is_fixed(names, each) for each in of)}
    sums = _sums(nodes) & begun - _joined(nodes, given)
    whole = values.get(given.id, []) if isinstance(given, ast.Name) else [given]
    for node in (each for value in whole for each in ast.walk(value)):
        for inner in _taken_of(node):
            for ratio in (inner, *values.get(last_name(inner), ())):
                if _is_ratio_of(ratio, sums):
                    return ast.unparse(node), ast.unparse(ratio)
    return None


def _is_fixed(names: SharedNames, value: ast.AST) -> bool:
    """True of what is no variable's: ``0.0``, ``torch.zeros(1)``."""
    used = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
    return used <= names.are_imported(used) | _OF_CELLS


def _taken_of(node: ast.AST) -> Iterator[ast.AST]:
    """What such a function is taken of: ``exp(x)``, ``x.sqrt()``, ``x ** 0.5``."""
    match node:
        case ast.Call(func=func, args=[inner]) if last_name(func) in _CURVED:
            yield inner
        case ast.Call(func=ast.Attribute(value=inner, attr=attr), args=[]) if attr in _CURVED:
            yield inner
        case ast.BinOp(left=inner, op=ast.Pow(), right=ast.Constant(value=0.5)):
            yield inner


def _sums(nodes: Iterable[ast.AST]) -> set[str]:
    """The variables that loops add to."""
    inside = (node for loop in nodes if isinstance(loop, LOOPS) for node in ast.walk(loop))
    return {
        last_name(node.target)
        for node in inside
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add)
    }


def _joined(nodes: Iterable[ast.AST], given: ast.expr) -> set[str]:
    """What other collectives are given: it is no rank's own any more."""
    return {
        name
        for node in nodes
        if isinstance(node, ast.Call) and last_name(node.func) in _JOINS
        for argument in node.args
        if argument is not given
        for name in names_in(argument)
    }


def _is_ratio_of(node: ast.AST, sums: set[str]) -> bool:
    match node:
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _number(left) in sums and _number(right) in sums
        case ast.Call(args=[inner, *_]):  # torch.tensor(a / b)
            return _is_ratio_of(inner, sums)
    return False


def _number(node: ast.AST) -> str:
    """The variable whose number it is: also of ``x.item()`` and ``float(x)``."""
    match node:
        case ast.Call(func=ast.Attribute(value=value, attr="item"), args=[]):
            return last_name(value)
        case ast.Call(func=ast.Name(id="float"), args=[value]):
            return last_name(value)
    return last_name(node)


def _is_averaged(names: SharedNames, function: ast.AST, reduced: str) -> bool:
    """Whether what is reduced is then divided by the number of ranks."""
    for node in ast.walk(function):
        match node:
            case ast.BinOp(left=left, op=ast.Div(), right=by):
                divided = left
            case ast.AugAssign(target=target, op=ast.Div(), value=by):
                divided = target
            case ast.Call(func=ast.Attribute(value=value, attr=attr), args=[by]):
                if attr not in _DIVIDES:
                    continue
                divided = value
            case _:
                continue
        if reduced in names_in(divided) and names.is_world_size(by):
            return True
    return False
