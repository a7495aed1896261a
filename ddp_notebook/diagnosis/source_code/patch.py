"""Small changes to the user's code that correct a mistake, as lines of a diff.

A change is offered only where it is certainly right. It has whole lines, ``-old``, ``+new`` and
`` kept``, from the first that changes to the last; it is empty where the code is not that simple.
"""

from __future__ import annotations

import ast
import difflib
import itertools
from collections.abc import Iterator

from ddp_notebook import syntax
from ddp_notebook.diagnosis.source_code.conditions import holds, last_name, shallow
from ddp_notebook.diagnosis.source_code.names import Names, Varies
from ddp_notebook.diagnosis.source_code.sources import MAGIC

_WRAPPERS = ("DDP", "DistributedDataParallel")
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
    if text.strip() != ast.get_source_segment(source, statement):
        return ""  # more in this line, or it goes on in the next
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
    if len(made) != 1 or made[0].end_lineno != line or not made[0].args:
        return ""
    if {None, "find_unused_parameters"} & {keyword.arg for keyword in made[0].keywords}:
        return ""
    text = source.splitlines()[line - 1]
    data, end = text.encode(), made[0].end_col_offset or 0
    call = data[: end - 1].decode().rstrip().removesuffix(",")
    return _diff([text], [f"{call}, find_unused_parameters=True){data[end:].decode()}"])


def through_wrapper(source: str, line: int) -> str:
    """Return the change that calls DDP in `line`, not the module inside; or nothing.

    Only where no other line calls a module inside.
    """
    calls = [call.func for call in _calls(_tree(source), "module")]
    if len(calls) != 1 or not isinstance(calls[0], ast.Attribute) or calls[0].lineno != line:
        return ""
    inside, text = calls[0], source.splitlines()[line - 1]
    if not isinstance(inside.value, ast.Name) or inside.end_lineno != line:
        return ""
    data, begin, end = text.encode(), inside.value.end_col_offset or 0, inside.end_col_offset
    return _diff([text], [(data[:begin] + data[end:]).decode()])


def wait(source: str, line: int) -> str:
    """Return the change that waits for a collective as soon as it is started; or nothing."""
    match _around(_tree(source), line, (ast.Expr, ast.Assign)):
        case [ast.Expr() | ast.Assign(targets=[ast.Name() | ast.Attribute()]) as started]:
            call, text = started.value, source.splitlines()[line - 1]
            given = {each.arg for each in getattr(call, "keywords", ())}
            # Of a group that a rank is not in there is nothing to wait for.
            if "async_op" not in given or given & {None, "group"}:
                return ""
            if text.strip() != ast.get_source_segment(source, started):
                return ""
            if isinstance(started, ast.Expr):
                return _diff([text], [f"{text.rstrip()}.wait()"])
            indent = text[: started.col_offset]
            return _diff([text], [text, f"{indent}{ast.unparse(started.targets[0])}.wait()"])
    return ""


def set_epoch(source: str, line: int) -> str:
    """Return the change that calls `set_epoch` ahead of a loop over batches; or nothing.

    `line` is that of the loop. The sampler is the only one there is, and the epoch is counted by
    a loop around it.
    """
    tree = _tree(source)
    made = [
        (node, node.targets[0].id)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if last_name(getattr(node.value, "func", node)) == "DistributedSampler"
    ]
    loops = _around(tree, line, (ast.For, ast.While))
    if len(made) != 1 or len(_calls(tree, "DistributedSampler")) != 1 or len(loops) < 2:
        return ""
    (assigned, sampler), (epochs, batches) = made[0], loops[-2:]
    names = [_binds(node) for node in ast.walk(tree)]
    own, outer, inner = (
        _around(tree, at, _SCOPES) for at in (assigned.lineno, epochs.lineno, line)
    )
    match epochs:
        case ast.For(target=ast.Name(id=epoch), iter=ast.Call(func=ast.Name(id="range"))):
            seen = outer == inner and own in ([], inner) and batches.lineno == line
            if seen and names.count(sampler) == names.count(epoch) == 1:
                text = source.splitlines()[line - 1]
                call = f"{text[: batches.col_offset]}{sampler}.set_epoch({epoch})"
                return _diff([text], [call, text])
    return ""


def without_setting(source: str, variable: str) -> str:
    """Return the change that leaves a variable of the environment as it was; or nothing.

    Only where the code names it just once, to set it.
    """
    tree, lines = _tree(source), source.splitlines()
    named = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value == variable]
    bodies = {
        statement: (parent, body)
        for parent in ast.walk(tree)
        if isinstance(body := getattr(parent, "body", None), list)
        for statement in body
    }
    for statement, (parent, body) in bodies.items():
        match statement:
            case ast.Assign(targets=[ast.Subscript(value=owner, slice=ast.Constant() as key)]):
                if [key] == named and last_name(owner) == "environ":
                    # An `if` around it alone goes with it.
                    alone = len(body) == 1 and isinstance(parent, ast.If) and not parent.orelse
                    gone = parent if alone and isinstance(parent, ast.If) else statement
                    old = lines[gone.lineno - 1 : gone.end_lineno]
                    whole = "\n".join(old).strip() == ast.get_source_segment(source, gone)
                    if whole and gone in bodies and len(bodies[gone][1]) > 1:
                        return _diff(old, [])
    return ""


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _diff(old: list[str], new: list[str]) -> str:
    return "\n".join([*difflib.unified_diff(old, new, n=len(old), lineterm="")][3:])


def _calls(tree: ast.Module, *names: str) -> list[ast.Call]:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [call for call in calls if last_name(call.func) in names]


def _around(tree: ast.Module, line: int, kinds: tuple[type[ast.stmt], ...]) -> list[ast.stmt]:
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
