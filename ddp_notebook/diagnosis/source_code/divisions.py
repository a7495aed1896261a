"""What the code divides by what: a mean over ranks, a loss by their number, a mean of ratios.

By names alone, as in `shared_names.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from functools import partial

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

_LEAVING_OUT = frozenset({"unique", "narrow", "set", "dict", "drop_duplicates", "argsort", "sort"})
_HOLDING = frozenset({"tensor", "as_tensor", "Tensor", "FloatTensor", "float", "array", "stack"})
_DIVIDING = ("div", "div_", "divide", "true_divide", "floor_divide")


def is_divisor(sources: Sources, path: Sequence[Place]) -> bool:
    """True when something is divided by what comes of the tensor that `path` reduces.

    Where that is a function's own argument, by what it is called with.
    """
    trees = sources.in_use(place.file for place in path)
    divisors = SharedNames(trees).read(divisors_in(trees))
    for place in reversed(path):
        tree = sources.tree(place)
        given = _reduced_at(tree, place.line)
        function = next(functions_around(tree, place.line), None)
        if function is None or not _is_argument(function, given):
            return not divisors.isdisjoint(given)
    return False


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
        given = _made_of(function, _reduced_at(tree, place.line, called), place.line)
        given -= SharedNames(sources.in_use([place.file])).are_imported(given)
        averaged = averaged or any(True for _ in _divided_in(function, given))
        called = getattr(function, "name", "")
    return averaged


def divides_loss_by_world(sources: Sources, place: Place) -> bool:
    """True when what is given a backward at `place` was divided by the number of ranks."""
    names = SharedNames(sources.in_use([place.file]))
    divisors = _divisors_of_loss(names, sources.tree(place), place.line)
    return any(map(names.is_world_size, divisors))


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
        given = _reduced_at(tree, place.line, called)
        given -= names.are_imported(given)
        divisors = list(_divided_in(function, given))
        by_world |= any(map(names.is_world_size, divisors))
        if _divides_by_what_came(function, place.line, given, divisors):
            return False
        before = _divided_before(names, function, place.line, called)
        by_own |= any(map(partial(_is_own, names, counts), before))
        called = getattr(function, "name", "")
        if function is None or not called or not _is_argument(function, given):
            break
    return by_world and by_own and _comes_of(names, given, sources.tree(evaluated), evaluated.line)


def chooses_rate_by_world(sources: Sources, used: Collection[str]) -> bool:
    """True when a learning rate comes of the number of ranks.

    In the files `used` and those that they import; in any if none is given.
    """
    trees = sources.known(sources.imported_by(used)) or sources.known()
    nodes = (node for tree in trees for node in ast.walk(tree))
    rates = (n.value for n in nodes if isinstance(n, ast.keyword) and n.arg == "lr")
    return "get_world_size" in SharedNames(trees).read(rates)


# -- rows that ranks gather --------------------------------------------------------------------


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


# -- the code of a division ------------------------------------------------------------------


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
            pieces += _results(made, wanted)
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


def _results(made: ast.AST, wanted: Collection[int] | None = None) -> Iterator[ast.AST]:
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


def _returned(node: ast.AST, wanted: Collection[int] | None) -> list[ast.expr]:
    match node:
        case ast.Return(value=ast.Tuple(elts=elements)):
            return [each for i, each in enumerate(elements) if wanted is None or i in wanted]
        case ast.Return(value=ast.expr() as value):
            return [value]
    return []


def _means_in(node: ast.AST) -> Iterator[ast.Call]:
    for child in ast.walk(node):
        match child:
            case ast.Call(func=ast.Attribute(attr="mean")):
                yield child


def _divisors_of_loss(
    names_of: SharedNames, tree: ast.Module | None, line: int
) -> Iterator[ast.AST]:
    """What the loss of the backward in a line was divided by, there, before it or in a function.

    Not afterwards: what is logged is divided, too.
    """
    plain = list(_plain_at(tree, line))
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
    made = (each for child in names_of.called_in(ahead) for each in _results(child))
    yield from divisors_in(made)


def _given_a_backward(plain: Iterable[ast.AST]) -> set[str]:
    calls = [node for child in plain for node in ast.walk(child) if isinstance(node, ast.Call)]
    return {name for call in calls if last_name(call.func) == "backward" for name in names_in(call)}


def _given_at(names_of: SharedNames, tree: ast.AST | None, line: int) -> set[str]:
    """The names that get a value in a line, or one more value: ``losses.append(...)``.

    Also those that a function called there changes.
    """
    plain = list(_plain_at(tree, line))
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


def _reduced_at(tree: ast.AST | None, line: int, called: str = "") -> set[str]:
    """What the calls in a line, or those of one function, are given, and their result's name."""
    found: set[str] = set()
    for node in _plain_at(tree, line):
        calls = [child for child in ast.walk(node) if isinstance(child, ast.Call)]
        if called and called not in (last_name(call.func) for call in calls):
            continue
        found.update(
            name for call in calls for expression in call.args for name in names_in(expression)
        )
        found.update(name for name, _ in given_in(node))
    return found - {"self"}


def _plain_at(tree: ast.AST | None, line: int) -> Iterator[ast.stmt]:
    """The statements in a line, without those around them."""
    nodes = [child for child in ast.walk(tree) if isinstance(child, ast.stmt)] if tree else []
    for node in nodes:
        if not hasattr(node, "body") and holds(node, line):
            yield node


def _is_argument(function: ast.AST, names: Collection[str]) -> bool:
    """True when one of these is an argument of the function, or is made of one in it."""
    made_of = SharedNames([function]).read(ast.Name(name) for name in names)
    return not made_of.isdisjoint(parameters_of(function) - {"cls"})
