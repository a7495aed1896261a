"""Small changes to the user's code that correct a mistake, as lines of a diff.

A change is offered only where it is certainly right. It has whole lines, ``-old``, ``+new`` and
`` kept``, from the first that changes to the last; it is empty where the code is not that simple.
"""

from __future__ import annotations

import ast
import difflib
import itertools
from collections.abc import Iterator
from typing import Any

from ddp_notebook import syntax
from ddp_notebook.diagnosis.source_code.conditions import holds, last_name, shallow
from ddp_notebook.diagnosis.source_code.names import Names, Varies
from ddp_notebook.diagnosis.source_code.sources import MAGIC

_WRAPPERS = ("DDP", "DistributedDataParallel")
_UNKNOWN = {None, "find_unused_parameters"}
"""Arguments of DDP beside which nothing is added; None is ``**options``."""
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_PLACED = (ast.Expr, ast.Assign, ast.Return)
"""Statements that evaluate one expression, once."""
_ODD = {
    *(ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp),
    *(ast.GeneratorExp, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr),
}
"""Expressions whose parts are evaluated never, often or elsewhere, or that bind a name."""


def hoist(source: str, line: int, test_line: int, called: str) -> str:
    """Return the change that moves a call of `called` out of the `if` in `test_line`.

    `line` is that of the call. Empty where that may not be right.
    """
    tree, lines = _tree(source), source.splitlines()
    test = _without_else(tree, test_line)
    statement = next((each for each in test.body if holds(each, line)), None) if test else None
    call = _only_call(statement, called)
    if not (test and statement and call and _may_precede(tree, test, statement, call)):
        return ""
    first, last = test.lineno - 1, statement.lineno - 1
    text, above = lines[last], lines[first:last]
    if _whole_lines(source, statement) != [text]:
        return ""
    # A call alone moves as it stands, and so does one that gives its result to a name of the
    # branch's own.
    targets = {getattr(target, "id", "") for target in getattr(statement, "targets", ())}
    alone = isinstance(statement, ast.Expr | ast.Assign) and statement.value is call
    if alone and targets <= _bound_for_some(tree):
        kept = above if len(test.body) > 1 else []
        moved = text.strip()
    else:
        name, data = _new_name(tree), text.encode()  # columns of a tree count bytes of UTF-8
        ends = data[: call.col_offset].decode(), data[call.end_col_offset :].decode()
        moved = f"{name} = {data[call.col_offset : call.end_col_offset].decode()}"
        kept = [*above, name.join(ends)]
    return _diff(lines[first : last + 1], [f"{lines[first][: test.col_offset]}{moved}", *kept])


def find_unused_parameters(source: str, line: int) -> str:
    """Return the change by which DDP, made in `line`, looks for unused parameters; or nothing."""
    made = [call for call in _calls(_tree(source), *_WRAPPERS) if call.lineno == line]
    given = {keyword.arg for call in made for keyword in call.keywords}
    if len(made) != 1 or made[0].end_lineno != line or not made[0].args or given & _UNKNOWN:
        return ""
    text = source.splitlines()[line - 1]
    data, end = text.encode(), made[0].end_col_offset or 0
    call = data[: end - 1].decode().rstrip().removesuffix(",")
    return _diff([text], [f"{call}, find_unused_parameters=True){data[end:].decode()}"])


def through_wrapper(source: str, line: int, name: str) -> str:
    """Return the change that calls DDP, named `name`, and not the module inside; or nothing.

    Only where no other line than `line` calls a module inside.
    """
    match [call.func for call in _calls(_tree(source), "module")]:
        case [ast.Attribute(value=ast.Name(id=owner)) as inside] if owner == name:
            if inside.lineno == inside.end_lineno == line:
                text = source.splitlines()[line - 1]
                data, end = text.encode(), inside.end_col_offset or 0
                whole = data[: inside.value.end_col_offset] + data[end:]
                return _diff([text], [whole.decode()])
    return ""


def wait(source: str, line: int) -> str:
    """Return the change that waits for a collective as soon as it is started; or nothing."""
    match _around(_tree(source), line, (ast.Expr, ast.Assign)):
        case [ast.Expr() | ast.Assign(targets=[ast.Name() | ast.Attribute()]) as started]:
            given = {each.arg for each in getattr(started.value, "keywords", ())}
            text, *others = _whole_lines(source, started) or ("", "")
            # Of a group that a rank is not in there is nothing to wait for.
            if others or "async_op" not in given or given & {None, "group"}:
                return ""
            if isinstance(started, ast.Expr):
                return _diff([text], [f"{text}.wait()"])
            handle = f"{text[: started.col_offset]}{ast.unparse(started.targets[0])}"
            return _diff([text], [text, f"{handle}.wait()"])
    return ""


def set_epoch(source: str, line: int) -> str:
    """Return the change that calls `set_epoch` ahead of a loop over batches; or nothing.

    `line` is that of the loop. The sampler is the only one there is, and the epoch is counted by
    a loop around it.
    """
    tree = _tree(source)
    names = [_binds(node) for node in ast.walk(tree)]
    loops = _around(tree, line, (ast.For, ast.While))[-2:]
    made = [node for node in ast.walk(tree) if _value_calls(node, "DistributedSampler")]
    match made + loops if source.count("DistributedSampler(") == 1 else []:
        case [
            ast.Assign(targets=[ast.Name(id=sampler)]),
            ast.For(target=ast.Name(id=epoch), iter=ast.Call(func=ast.Name(id="range"))),
            ast.For(lineno=first, col_offset=column),
        ] if first == line and names.count(sampler) == names.count(epoch) == 1:
            own, around, within = (_around(tree, each.lineno, _SCOPES) for each in made + loops)
            if around == within and own in ([], within):
                text = source.splitlines()[line - 1]
                return _diff([text], [f"{text[:column]}{sampler}.set_epoch({epoch})", text])
    return ""


def without_setting(source: str, variable: str) -> str:
    """Return the change that leaves a variable of the environment as it was; or nothing.

    Only where the code names it just once, to set it.
    """
    bodies = (getattr(node, "body", None) for node in ast.walk(_tree(source)))
    several = (body for body in bodies if isinstance(body, list) and len(body) > 1)
    for statement in itertools.chain.from_iterable(several):
        match statement:
            case ast.If(body=[ast.Assign() as held], orelse=[]) | (ast.Assign() as held):
                sets = ast.unparse(held.targets[0]).endswith(f"environ[{variable!r}]")
                if sets and source.count(variable) == 1:
                    return _diff(_whole_lines(source, statement), [])
    return ""


def _diff(old: list[str], new: list[str]) -> str:
    return "\n".join([*difflib.unified_diff(old, new, n=len(old), lineterm="")][3:])


def _whole_lines(source: str, statement: ast.stmt) -> list[str]:
    """Return the lines of a statement; none if they have more than that."""
    lines = source.splitlines()[statement.lineno - 1 : statement.end_lineno]
    whole = ast.get_source_segment(source, statement)
    return lines if "\n".join(lines).lstrip() == whole else []


def _calls(tree: ast.Module, *names: str) -> list[ast.Call]:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [call for call in calls if last_name(call.func) in names]


def _value_calls(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Assign) and last_name(getattr(node.value, "func", node)) == name


def _around(tree: ast.Module, line: int, kinds: tuple[type[ast.stmt], ...]) -> list[Any]:
    """Return the statements of these kinds with a line in them, the outermost first."""
    return [node for node in ast.walk(tree) if isinstance(node, kinds) and holds(node, line)]


def _tree(source: str) -> ast.Module:
    """Return the code as a tree; an empty one where it does not parse."""
    try:
        return shallow(syntax.parse(MAGIC.sub("", source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def _without_else(tree: ast.Module, line: int) -> ast.If | None:
    """Return the `if` in a line; None for one with an ``else``, or that is one itself."""
    branches = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    others = [branch for branch in branches if branch.orelse]
    others += [branch.orelse[0] for branch in others if isinstance(branch.orelse[0], ast.If)]
    return next(
        (branch for branch in branches if branch.lineno == line and branch not in others), None
    )


def _only_call(statement: ast.stmt | None, called: str) -> ast.Call | None:
    """Return the call of `called`, if a statement evaluates it once, and no other call before."""
    value = statement.value if isinstance(statement, _PLACED) else None
    nodes = list(ast.walk(value)) if value else []
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    found = next((call for call in calls if last_name(call.func) == called), None)
    if found is None or _ODD.intersection(map(type, nodes)):
        return None
    inside = set(ast.walk(found))
    return found if all(call in inside or found in ast.walk(call) for call in calls) else None


def _may_precede(tree: ast.Module, test: ast.If, statement: ast.stmt, call: ast.Call) -> bool:
    """True where a call has all that it needs before the `if`, on every rank."""
    # The test may ask for the rank alone: one that asks for the data may protect the call. And what
    # stands in the branch before the call stays there, so it may not prepare the call.
    above = itertools.takewhile(lambda each: each is not statement, test.body)
    needed = set(_chains(call))
    return (
        Names(tree).varies(test.test) is Varies.BY_RANK
        and not any(getattr(node, "args", ()) for node in ast.walk(test.test))
        and all(ast.unparse(each).startswith("print(") for each in above)
        and not needed.intersection(_chains(test.test))
        and not {chain.partition(".")[0] for chain in needed} & _bound_for_some(tree)
    )


def _bound_for_some(tree: ast.Module) -> set[str]:
    """Return the names that only some ranks give a value: in branches that ask for the rank."""
    names = Names(tree)
    branches = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and names.varies(node.test) is Varies.BY_RANK
    )
    inside = {node for branch in branches for node in ast.walk(branch)}
    bound = [(_binds(node), node in inside) for node in ast.walk(tree)]
    return {name for name, some in bound if some} - {name for name, some in bound if not some}


def _binds(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            return name
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.alias(name=name, asname=other):
            return other or name.partition(".")[0]
    return ""


def _chains(node: ast.AST) -> Iterator[str]:
    """Yield the names in an expression with their attributes: ``self.rank``."""
    if isinstance(node, ast.Name | ast.Attribute):
        yield ast.unparse(node)
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.Attribute) and isinstance(child, ast.Name | ast.Attribute)):
            yield from _chains(child)


def _new_name(tree: ast.Module) -> str:
    name, taken = "result", {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    while name in taken:
        name += "_"
    return name
