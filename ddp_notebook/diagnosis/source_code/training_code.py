"""The code of a training, searched for printed results of an evaluation, and random numbers.

That one rank printed something after an evaluation proves nothing. So the print must be of a
number that was counted up, or taken out of a tensor, in the evaluation itself: there, in the
function around it, or where that function was called.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from ddp_notebook.diagnosis.source_code.conditions import holds, last_name
from ddp_notebook.diagnosis.source_code.sources import Sources
from ddp_notebook.model import Place

_NUMBERS = {"item()", "float()", "int()", "sum()", "round()", "tolist()"}
"""Functions and methods that make numbers of tensors."""
_SAYING = {"print", "info", "warning", "write", "log", "echo"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCKS = (ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith)
_DEEPEST = 3
"""So many functions are followed, around an evaluation or from a loop."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_reported(tree: ast.Module, line: int) -> bool:
    """Return whether a number from the evaluation in `line` is printed after it."""
    scope: ast.AST = _function(tree, line) or tree
    # The evaluation is the innermost `with` around it, or else its loop. The loop over epochs
    # around both has the training in it as well. Without either it is the statement itself.
    around = [statement for statement in _statements(scope) if holds(statement, line)]
    blocks = [statement for statement in around if isinstance(statement, _BLOCKS)]
    withs = [block for block in blocks if isinstance(block, ast.With | ast.AsyncWith)]
    block = max(withs or blocks or around, key=lambda each: each.lineno, default=None)
    if block is None:
        return False
    # What a scope has of it: variables, and functions that return it. From there to the callers of
    # the function, where its result is what they have.
    ahead = [(scope, _numbers_of(block, line), block.end_lineno or line, 0)]
    while ahead:
        scope, known, after, depth = ahead.pop()
        for _ in range(_DEEPEST):
            for statement in _statements(scope):
                value, names = _assigned(statement)
                if value is not None and value.lineno > after and _words(value) & known:
                    known |= names
        calls = (node for node in _own(scope) if isinstance(node, ast.Call) and node.lineno > after)
        said = (call for call in calls if _called(call) in _SAYING)
        if any(known & _words(part) for call in said for part in (*call.args, *call.keywords)):
            return True
        returned = (node for node in _own(scope) if isinstance(node, ast.Return))
        given = any(known & _words(node) for node in returned)
        if isinstance(scope, _FUNCTIONS) and given and depth <= _DEEPEST:
            for call in (node for node in ast.walk(tree) if _called(node) == scope.name):
                at = getattr(call, "lineno", 1)
                ahead.append((_function(tree, at) or tree, {f"{scope.name}()"}, at - 1, depth + 1))
    return False


def _numbers_of(block: ast.stmt, line: int) -> set[str]:
    """The variables that are numbers, or count up, by what the model gave in `line`."""
    given: set[str] = set()
    numbers: set[str] = set()
    for _ in range(_DEEPEST):
        for statement in (block, *_statements(block)):
            value, names = _assigned(statement)
            if value is None:
                continue
            words = _words(value)
            counts = isinstance(statement, ast.AugAssign) or words & _NUMBERS
            of_model = words & given or holds(value, line)
            if words & numbers or (of_model and counts):
                numbers |= names
            elif of_model:
                given |= names
    return numbers


def _assigned(statement: ast.AST) -> tuple[ast.expr | None, set[str]]:
    """Return the value that a statement sets, or appends to a list, and its variables."""
    match statement:
        case ast.Assign(targets=targets, value=value):
            return value, {name for target in targets for name in _names(target)}
        case (
            ast.AugAssign(target=target, value=value)
            | ast.AnnAssign(target=target, value=ast.expr() as value)
        ):
            return value, _names(target)
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(value=ast.Name(id=name), attr="append" | "extend"),
                args=[value, *_],
            )
        ):
            return value, {name}
    return None, set()


def _words(node: ast.AST) -> set[str]:
    """The variables that an expression mentions, and the functions that it calls: ``float()``."""
    return _names(node) | {f"{_called(child)}()" for child in ast.walk(node) if _called(child)}


def _names(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def _called(node: ast.AST) -> str:
    """The name of the function or method that is called; empty where nothing is."""
    return last_name(node.func) if isinstance(node, ast.Call) else ""


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a scope that are in no function inside it."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, (*_FUNCTIONS, ast.Lambda)):
            yield child
            yield from _own(child)


def _statements(scope: ast.AST) -> Iterator[ast.stmt]:
    return (node for node in _own(scope) if isinstance(node, ast.stmt))


def _function(tree: ast.AST, line: int) -> _Function | None:
    """The innermost function around a line."""
    around = [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS) and holds(node, line)]
    return max(around, key=lambda each: each.lineno, default=None)


# -- draws -------------------------------------------------------------------------------
# Random numbers that code draws for the samples of a batch, where a training step is made.


_LIKE = frozenset({"rand_like", "randn_like", "randint_like", "bernoulli"})
_SHAPED = frozenset({"rand", "randn", "randint", "normal"})
_IN_PLACE = frozenset({"normal_", "uniform_", "bernoulli_", "random_", "exponential_"})
_SIZE = re.compile(r"\b(len|size)\(|\.shape\b")
"""The size of something: ``len(x)``, ``x.shape[0]``, ``x.size(0)``."""
_LOOPS = (ast.For, ast.AsyncFor, ast.While)


def draw_around(sources: Sources, place: Place) -> str:
    """Return the call that draws numbers for the batch: ``a.py, line 3: rand_like(x)``.

    In the loop around `place` or a function of it, or else where a data set makes one sample on
    the rank itself: a loader's workers have generators of their own. Empty without such a call.
    """
    tree = sources.tree(place)
    if tree is None:
        return ""
    functions = [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]
    scopes = (node for node in ast.walk(tree) if isinstance(node, (*_LOOPS, *_FUNCTIONS)))
    around = [node for node in scopes if holds(node, place.line)]
    innermost = max(around, key=lambda node: node.lineno, default=None)
    # The innermost loop or function around the line, and the functions that it calls, level by
    # level.
    level = _calls([innermost] if innermost is not None else [])
    calls = list(level)
    by_name = {function.name: function for function in functions}
    for _ in range(_DEEPEST):
        names = dict.fromkeys(last_name(call.func) for call in level)
        level = _calls(by_name.pop(name) for name in names if name in by_name)
        calls += level
    call = next((call for call in calls if _draws(call, in_batch=True)), None)
    if call is None:
        samples = _calls(node for node in functions if node.name == "__getitem__")
        call = next((call for call in samples if _draws(call, in_batch=False)), None)
    return f"{Place(place.file, call.lineno)}: {ast.unparse(call)}" if call is not None else ""


def _calls(nodes: Iterable[ast.AST]) -> list[ast.Call]:
    return [child for node in nodes for child in ast.walk(node) if isinstance(child, ast.Call)]


def _draws(call: ast.Call, *, in_batch: bool) -> bool:
    """True of a call that draws numbers, in whichever way, without a generator of its own.

    In the code of a batch a shape must be the size of something: else it may not be of samples.
    """
    name = last_name(call.func)
    if any(keyword.arg == "generator" for keyword in call.keywords):
        return False
    if name in _SHAPED and in_batch:
        return any(_SIZE.search(ast.unparse(argument)) for argument in call.args)
    if name in _SHAPED:
        return ast.unparse(call.func) == f"torch.{name}"
    return name in _LIKE or (name in _IN_PLACE and isinstance(call.func, ast.Attribute))
