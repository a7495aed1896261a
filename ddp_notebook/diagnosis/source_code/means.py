"""Means that ranks average: of rows, of ratios, of a curve's values.

By names alone, as in `shared_names.py`; only where all of it is seen.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from functools import partial

from ddp_notebook.diagnosis.source_code.conditions import holds, last_name
from ddp_notebook.diagnosis.source_code.divisions import (
    divisors_in,
    is_argument,
    plain_at,
    reduced_at,
    results,
)
from ddp_notebook.diagnosis.source_code.shared_names import (
    SharedNames,
    given_in,
    names_in,
    parameters_of,
)
from ddp_notebook.diagnosis.source_code.sources import Sources
from ddp_notebook.diagnosis.source_code.statements import LOOPS, call_at, functions_around
from ddp_notebook.model import Place

_LEAVING_OUT = frozenset({"unique", "narrow", "set", "dict", "drop_duplicates", "argsort", "sort"})
_HOLDING = frozenset({"tensor", "as_tensor", "Tensor", "FloatTensor", "float", "array", "stack"})
_PARTS = re.compile(
    r"macro|task|domain|client|language|(^|_)(fold|site|lang|corpus)", re.IGNORECASE
)
_CURVED = frozenset({"exp", "sqrt"})
_OF_CELLS = frozenset({"torch", "device"})
"""What an earlier cell has imported or set."""
_JOINS = frozenset({"all_reduce", "reduce", "all_gather", "all_gather_object", "gather"})
_DIVIDES = frozenset({"div", "div_", "divide", "true_divide"})


def averages_every_row(sources: Sources, path: Sequence[Place]) -> bool:
    """True when a mean is taken of what `path` gathers from all ranks, and no row is left out.

    Rows are left out by a slice with an end, by their index, or by a function such as unique.
    """
    averaged, called = False, ""
    for place in reversed(path):
        tree = sources.tree(place)
        function = next(functions_around(tree, place.line), tree)
        if function is None or any(map(_leaves_rows_out, _own_nodes(function))):
            return False
        given = _made_of(function, reduced_at(tree, place.line, called), place.line)
        given -= SharedNames(sources.in_use([place.file])).are_imported(given)
        averaged = averaged or any(True for _ in _divided_in(function, given))
        called = getattr(function, "name", "")
    return averaged


def is_mean_of_ratios(
    sources: Sources, path: Sequence[Place], evaluated: Place, *, by_counts: bool = False
) -> bool:
    """True when what comes of `evaluated` is divided, summed up by `path`, and divided again.

    First by what each rank has counted, then by the number of ranks: in the function that sums
    it up, or in one that calls it, or that gives it what it sums up. With `by_counts`, first by a
    sum of several counts that the data decide, as an F1 score is: ``tp / (tp + fp)``.
    """
    trees = sources.in_use(each.file for each in (*path, evaluated))
    names, counts = SharedNames(trees), _added_to(trees) if by_counts else None
    by_world = by_own = False
    called, given = "", set[str]()
    for place in reversed(path):
        tree = sources.tree(place)
        function = next(functions_around(tree, place.line), tree)
        given = reduced_at(tree, place.line, called)
        given -= names.are_imported(given)
        divisors = list(_divided_in(function, given))
        by_world |= any(map(names.is_world_size, divisors))
        if _divides_by_what_came(function, place.line, given, divisors):
            return False
        before = _divided_before(names, function, place.line, called)
        by_own |= any(map(partial(_is_own, names, counts), before))
        called = getattr(function, "name", "")
        if function is None or not called or not is_argument(function, given):
            break
    return by_world and by_own and _comes_of(names, given, sources.tree(evaluated), evaluated.line)


def is_over_parts(sources: Sources, path: Sequence[Place]) -> bool:
    """True where names in the code say that a mean over tasks, domains or the like is meant.

    Each of them counts the same then, however many samples it has.
    """
    names = {place.function for place in path}
    for place in path:
        tree = sources.tree(place)
        names |= reduced_at(tree, place.line)
        for function in functions_around(tree, place.line):
            names |= parameters_of(function)
    return any(map(_PARTS.search, names))


def curved_mean(sources: Sources, path: Sequence[Place]) -> tuple[str, str] | None:
    """Of what `path` reduces: the function of a rank's own mean, as written, and that mean.

    The function is exp or a root, as of a perplexity or an RMSE. None where the code does not show
    all of it: the two sums that a loop of the same function adds to, their ratio, the function of
    it, the all_reduce, and the division by the number of ranks.
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


# -- rows that ranks gather ----------------------------------------------------------------------


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, or of a module without its functions and classes."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield child
            yield from _own_nodes(child)


def _leaves_rows_out(node: ast.AST) -> bool:
    match node:
        case ast.Subscript(slice=ast.Slice(upper=ast.expr())):
            return True
        case ast.Subscript(slice=ast.Name() | ast.Attribute() | ast.Call() | ast.Compare()):
            return True
        case ast.Call(func=func):
            return last_name(func) in _LEAVING_OUT
    return isinstance(node, ast.DictComp)


def _made_of(function: ast.AST, names: set[str], line: int) -> set[str]:
    """These names, and what a function makes of them from this line on."""
    found = set(names)
    for node in _own_nodes(function):
        if getattr(node, "lineno", 0) >= line:
            found.update(
                name for name, value in given_in(node) if not found.isdisjoint(names_in(value))
            )
    return found


# -- ratios of each rank -------------------------------------------------------------------------


def _divided_in(function: ast.AST | None, names: Container[str]) -> Iterator[ast.AST]:
    """By what these names are divided in a function, or what they are made of is.

    A mean divides, too: it stands for the number of what it is taken of.
    """
    for node in ast.walk(function) if function is not None else ():
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):
            named = [*(name for name, _ in given_in(node)), *names_in(node)]
            if any(name in names for name in named):
                yield from divisors_in([node])
                yield from _means_in(node)


def _divided_before(
    names_of: SharedNames, scope: ast.AST | None, line: int, called: str
) -> Iterator[ast.AST]:
    """By what is divided of which the arguments of a call in this line are made, until then.

    There, in the statements before it, and in the user's functions and properties that they use.
    """
    for node, names in _making(scope, line, called):
        pieces: list[ast.AST] = [node]
        used = {last_name(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}
        used |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
        wanted = _places_of(node, names)
        for made in names_of.behind(used - {called}):
            pieces += results(made, wanted)
        for piece in (part for each in pieces for part in _unweighted(each)):
            yield from divisors_in([piece])
            yield from _means_in(piece)


def _unweighted(node: ast.AST) -> Iterator[ast.AST]:
    """A piece of code where nothing is multiplied but by a number: no mean times its count."""
    products = (
        n for n in ast.walk(node) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult)
    )
    if all(isinstance(n.left, ast.Constant) or isinstance(n.right, ast.Constant) for n in products):
        yield node


def _divides_by_what_came(
    function: ast.AST | None, line: int, given: set[str], divisors: Iterable[ast.AST]
) -> bool:
    """Whether something is divided by a part of what was summed up: two sums, and their ratio."""
    made = _made_of(function, given, line) if function is not None else given
    after = (each for each in divisors if getattr(each, "lineno", 0) > line)
    parts = (each for each in after if last_name(getattr(each, "func", each)) != "mean")
    return any(name in made for each in parts for name in names_in(each))


def _making(scope: ast.AST | None, line: int, called: str) -> Iterator[tuple[ast.AST, set[str]]]:
    """The arguments of a call, and the code before it that makes them; with the names so far.

    The newest first, for what a name is given may be another name: ``torch.tensor([loss])``.
    """
    names: set[str] = set()
    for node in _until(scope, line):
        if holds(node, line):
            for argument in _arguments(node, called):
                names |= set(_carried(argument))
                yield argument, names
        elif not names.isdisjoint(_given_by(node)):
            yield node, names
            values = [value for name, value in given_in(node) if name in names]
            names |= {name for value in values for name in _carried(value)}


def _until(scope: ast.AST | None, line: int) -> list[ast.stmt]:
    """The plain statements of a scope up to this line, the newest first."""
    nodes = (n for n in (_own_nodes(scope) if scope is not None else ()) if isinstance(n, ast.stmt))
    plain = [n for n in nodes if not hasattr(n, "body") and n.lineno <= line]
    return sorted(plain, key=lambda n: -n.lineno)


def _arguments(node: ast.AST, called: str) -> Iterator[ast.expr]:
    """What the calls of one function in a statement are given; or all calls."""
    for call in (n for n in ast.walk(node) if isinstance(n, ast.Call)):
        if not called or last_name(call.func) == called:
            yield from call.args


def _given_by(node: ast.AST) -> Iterator[str]:
    """The names that a statement gives a value, or calls a method of: ``losses.append(...)``."""
    yield from (name for name, _ in given_in(node))
    match node:
        case ast.Expr(ast.Call(func=ast.Attribute(value=value))):
            yield last_name(value)


def _carried(value: ast.AST) -> Iterator[str]:
    """The names whose own value another one has: ``torch.tensor([a, b])`` has those of a and b."""
    match value:
        case ast.Name(id=name):
            yield name
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            yield from (name for each in elements for name in _carried(each))
        case ast.Call(func=func, args=[first, *_]) if last_name(func) in _HOLDING:
            yield from _carried(first)
        case ast.Call(func=ast.Attribute(value=of)) | ast.Subscript(value=of):
            yield from _carried(of)


def _added_to(trees: Iterable[ast.AST]) -> set[str]:
    """The names that the code adds to: ``self.tp[c] += hits``."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.AugAssign(target=target, op=ast.Add()):
                found.add(last_name(target.value if isinstance(target, ast.Subscript) else target))
    return found


def _is_own(names: SharedNames, counts: Collection[str] | None, divisor: ast.AST) -> bool:
    """True of anything but the number of ranks; with `counts`, of a sum of two or more of these.

    Such as ``(2 * tp + fp + fn).clamp(min=1)``.
    """
    if counts is None:
        return not names.is_world_size(divisor)
    sums = [n for n in ast.walk(divisor) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Add)]
    return any(len(set(counts) & set(names_in(each))) > 1 for each in sums)


def _comes_of(
    names_of: SharedNames, given: Iterable[str], tree: ast.Module | None, line: int
) -> bool:
    """Whether these names hang on what gets a value in a line."""
    made_of = names_of.read(ast.Name(name) for name in given)
    changed = _given_at(names_of, tree, line)
    changed |= _told(next(functions_around(tree, line), tree), changed)
    return not changed.isdisjoint(made_of)


def _places_of(node: ast.AST, names: Container[str]) -> list[int]:
    """Which of several results get these names: ``_, accuracy = ...``; none for one result."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=elements)]):
            return [i for i, each in enumerate(elements) if last_name(each) in names]
    return []


def _means_in(node: ast.AST) -> Iterator[ast.Call]:
    for child in ast.walk(node):
        match child:
            case ast.Call(func=ast.Attribute(attr="mean")):
                yield child


def _given_at(names_of: SharedNames, tree: ast.AST | None, line: int) -> set[str]:
    """The names that get a value in a line, or one more value: ``losses.append(...)``.

    Also those that a function called there changes.
    """
    plain = list(plain_at(tree, line))
    given = {name for node in plain for name, _ in given_in(node)}
    given |= names_of.written(names_of.called_in(plain))
    return given.union(map(_extended, plain)) - {""}


def _told(scope: ast.AST | None, names: Container[str]) -> set[str]:
    """The objects of which a method gets what is called so: ``meter.update(loss)``."""
    found = set()
    for node in _own_nodes(scope) if scope is not None else ():
        match node:
            case ast.Expr(ast.Call(func=ast.Attribute(value=value), args=arguments)):
                if any(name in names for each in arguments for name in names_in(each)):
                    found.add(last_name(value))
    return found - {""}


def _extended(statement: ast.stmt) -> str:
    match statement:
        case ast.Expr(ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"))):
            return name
    return ""


# -- a curve's values ----------------------------------------------------------------------------


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
