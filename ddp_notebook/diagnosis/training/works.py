"""Rules about collectives that were started, and whose end was not waited for."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.majority import by_ranks
from ddp_notebook.diagnosis.source_code.conditions import last_name
from ddp_notebook.diagnosis.source_code.statements import blocks
from ddp_notebook.model import (
    Category,
    Finding,
    FunctionalFacts,
    Place,
    Ranks,
    WorkFacts,
    in_brackets,
)

_SENDS = ("isend", "send")
_WAITING = frozenset({"wait", "barrier", "monitored_barrier", "synchronize", "is_completed"})
_UNREAD = frozenset(
    {"size", "numel", "dim", "element_size", "data_ptr", "detach", "is_contiguous"}
    | {"view", "chunk", "split", "unbind", "record_stream", "append", "extend"}
)
"""Methods that do not read the values of a tensor."""
_READING = frozenset({"copy_", "add_", "sub_", "mul_", "div_", "lerp_", "add", "sub", "mul", "div"})
"""Methods that read the values of their arguments."""
_READ_BY = frozenset({"float", "int", "bool", "print", "sum", "max", "min"})
_COMPUTING = ("torch.", "F.", "nn.functional.")
_UNREAD_BY = ("_like", ".is_tensor", ".numel", ".chunk", ".split", ".unbind")
_OUT_FIRST = frozenset(
    {
        *("all_reduce", "all_gather", "all_gather_into_tensor", "irecv"),
        *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
    }
)
"""They write the tensors that are their first argument."""
_Late = tuple[ast.Assign, tuple[str, int], tuple[str, str]]
"""A call; the tensor that is read before it was waited for, and the line; its name and handle."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_WAIT = "Keep every handle, and call its wait() before the tensor is used."


def unwaited(context: Context) -> Iterator[Finding]:
    """A tensor was changed, or gradients used, while a collective may still have been at work."""
    lines: dict[tuple[str, str], dict[int, WorkFacts]] = {}
    read: dict[tuple[str, str], dict[int, WorkFacts]] = {}
    for rank, facts in sorted(context.facts.items()):
        for work in facts.works:
            of = lines if work.written or work.stepped else read
            of.setdefault((str(work.place), work.operation), {})[rank] = work
    for those in lines.values():
        yield _misused(those)
    for those in read.values():
        yield from _read_at_once(context, those)
    yield from _waited_too_late(context, {place for place, _ in (*lines, *read)})
    yield from _functional({rank: facts.functional for rank, facts in context.facts.items()})


def _misused(of: Mapping[int, WorkFacts]) -> Finding:
    each = next(iter(of.values()))
    at = in_brackets(each.place)
    if each.operation in ("isend", "send"):
        what = "the tensor that it sends is changed"
    elif any(one.stepped for one in of.values()):
        what = "the optimizer uses the gradients that it reduces"
    else:
        what = "the tensor is changed that it works on"
    return Finding(
        Category.ASYNC_MISUSE,
        tuple(of),
        f"{what} before {each.operation} was waited for{at}: the result depends on which is first",
        _WAIT,
        evidence=by_ranks({rank: _counts(one) for rank, one in of.items()}),
    )


def _read_at_once(context: Context, of: Mapping[int, WorkFacts]) -> Iterator[Finding]:
    """Handles that were never asked, of tensors that the next lines of the code read.

    A barrier that came after those lines waited for the collectives, but too late.
    """
    each = next(iter(of.values()))
    never = all(one.unwaited + one.met == one.issued for one in of.values())
    if each.place is None or not never or each.operation in _SENDS:
        return
    given, line = _next_read(context.sources.tree(each.place), each.place.line, each.operation)
    if given:
        yield Finding(
            Category.ASYNC_MISUSE,
            tuple(of),
            f"{each.place.file}:{line} reads {given} before {each.operation} was waited for "
            f"({each.place}): the result depends on which is first",
            _WAIT,
            evidence=by_ranks(
                {r: f"{one.issued} started, none waited for before" for r, one in of.items()}
            ),
        )


def _waited_too_late(context: Context, known: Collection[str]) -> Iterator[Finding]:
    """Handles that are waited for, and tensors that the lines before that read."""
    for file in context.sources.with_words("async_op=True", "irecv("):
        tree = context.sources.tree(Place(file, 0))
        ways = _read_by_next_lines(tree), _read_by_callers(tree), _read_by_methods(tree)
        for node, read, of in chain(*ways):
            ranks, place = _who_started(context, file, node)
            if ranks and str(place) not in known:
                yield _too_late(ranks, place, read, of)
                known = {*known, str(place)}


def _too_late(ranks: Ranks, place: Place, read: tuple[str, int], of: tuple[str, str]) -> Finding:
    """What was read, and in which line; the call that gives it its values, and its handle."""
    (given, line), (call, handle) = read, of
    return Finding(
        Category.ASYNC_MISUSE,
        ranks,
        f"{place.file}:{line} reads {given} before {call} was waited for ({place}): the "
        "result depends on which is first",
        _WAIT,
        evidence=(f"{handle}.wait() comes after line {line}, or never",),
    )


def _read_by_next_lines(tree: ast.Module | None) -> Iterator[_Late]:
    for node, call, handle in _started(tree):
        given, line = _next_read(tree, node.lineno, call, {handle} | _functions(tree))
        if given:
            yield node, (given, line), (call, handle)


def _read_by_callers(tree: ast.Module | None) -> Iterator[_Late]:
    """Read where a function has returned the tensor and the handle of what it started."""
    starters = _starters(tree)
    own = _functions(tree) - starters.keys()
    for node, name, given, handle in _handed_out(tree, starters):
        started, call = starters[name]
        line = _read_after(tree, node.lineno, given, {handle} | own)
        if line:
            yield started, (given, line), (call, handle)


def _starters(tree: ast.Module | None) -> dict[str, tuple[ast.Assign, str]]:
    """Functions that return ``tensor, handle`` of what they started: the call, and its name."""
    found: dict[str, tuple[ast.Assign, str]] = {}
    functions = (n for n in ast.walk(tree or ast.Module([], [])) if isinstance(n, _FUNCTIONS))
    for function in functions:
        for node, call, handle in _started(function):
            given = next((ast.unparse(c.args[0]) for c in _calls(node, call) if c.args), "")
            if any(_pair(statement.value) == (given, handle) for statement in _returns(function)):
                found[function.name] = node, call
    return found


def _returns(function: ast.AST) -> Iterator[ast.Return]:
    yield from (node for node in ast.walk(function) if isinstance(node, ast.Return))


def _pair(node: ast.AST | None) -> tuple[str, str]:
    match node:
        case ast.Tuple(elts=[ast.Name(id=given), ast.Name(id=handle)]):
            return given, handle
    return "", ""


def _handed_out(
    tree: ast.Module | None, starters: Collection[str]
) -> Iterator[tuple[ast.Assign, str, str, str]]:
    """Where ``tensor, handle`` are the result of one of these functions, its name, and theirs."""
    for node in ast.walk(tree) if tree is not None and starters else ():
        match node:
            case ast.Assign(targets=[ast.Tuple() as target], value=ast.Call(func=func)):
                given, handle = _pair(target)
                if handle and last_name(func) in starters:
                    yield node, last_name(func), given, handle


def _read_by_methods(tree: ast.Module | None) -> Iterator[_Late]:
    """Handles that are attributes, of tensors that a method reads before it waits."""
    classes = (n for n in ast.walk(tree or ast.Module([], [])) if isinstance(n, ast.ClassDef))
    for owner in classes:
        for node, call, given, handle in _kept(owner):
            views = {f.name for f in _methods(owner) if _returns_part_of(f, given)}
            blocks_of = (block for method in _methods(owner) for block in blocks(method))
            lines = (_read_before(block, given, handle, views) for block in blocks_of)
            if line := next(filter(None, lines), 0):
                yield node, (given, line), (call, handle)


def _kept(owner: ast.ClassDef) -> Iterator[tuple[ast.Assign, str, str, str]]:
    """``self.work = dist.all_reduce(self.flat, async_op=True)``: the call, tensor and handle."""
    for node in ast.walk(owner):
        match node:
            case ast.Assign(
                targets=[ast.Attribute() as kept],
                value=ast.Call(func=func, args=[ast.Attribute() as first, *_]) as made,
            ) if last_name(func) in _OUT_FIRST and _is_async(made):
                yield node, last_name(func), ast.unparse(first), ast.unparse(kept)


def _methods(owner: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in owner.body if isinstance(node, _FUNCTIONS)]


def _returns_part_of(function: ast.FunctionDef | ast.AsyncFunctionDef, given: str) -> bool:
    """True of a method such as ``def views(self): return self.flat.split(self.sizes)``."""
    found = [n for statement in _returns(function) for n in _named(statement)]
    return any(ast.unparse(node) == given for node in found)


def _read_before(block: Iterable[ast.stmt], given: str, handle: str, views: set[str]) -> int:
    """The line that reads a tensor before its handle is waited for in the same block; else 0.

    Also by a loop over what a method in `views` returns.
    """
    line = 0
    for statement in block:
        names = {last_name(call.func) for call in _calls(statement)}
        if any(ast.unparse(node) == handle for node in _named(statement)):
            return line if "wait" in names and not hasattr(statement, "body") else 0
        if names & (_WAITING | _OUT_FIRST):
            return 0
        line = line or _line_reading(statement, given, views)
    return 0


def _line_reading(statement: ast.stmt, given: str, views: set[str]) -> int:
    parts: set[str] = set()
    calls = _calls(statement.iter) if isinstance(statement, ast.For) else ()
    if isinstance(statement, ast.For) and not views.isdisjoint(last_name(c.func) for c in calls):
        parts = {n.id for n in ast.walk(statement.target) if isinstance(n, ast.Name)}
    for part in _parts_read(statement):
        if isinstance(part, ast.expr) and (_is(part, given) or last_name(part) in parts):
            return part.lineno
    return 0


def _who_started(context: Context, file: str, node: ast.Assign) -> tuple[Ranks, Place]:
    """The ranks that called the collective of these lines, and where; all if that is unknown."""
    at = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    calls = {
        rank: record.place
        for rank, records in context.collectives.of.items()
        for record in records
        if (p := record.place) is not None and p.file == file and p.line in at
    }
    if not context.collectives.of:
        return tuple(sorted(context.facts)), Place(file, node.lineno)
    place = next((place for place in calls.values() if place is not None), None)
    return tuple(sorted(calls)), place or Place(file, node.lineno)


def _started(tree: ast.AST | None) -> Iterator[tuple[ast.Assign, str, str]]:
    """Asynchronous calls, their names, and the variables of their handles."""
    for node in ast.walk(tree) if tree is not None else ():
        match node:
            case ast.Assign(targets=[ast.Name(id=handle)], value=ast.Call() as call):
                name = last_name(call.func)
                if name in _OUT_FIRST and (name == "irecv" or _is_async(call)):
                    yield node, name, handle


def _is_async(call: ast.Call) -> bool:
    return any(
        k.arg == "async_op" and isinstance(k.value, ast.Constant) and k.value.value is True
        for k in call.keywords
    )


def _functions(tree: ast.Module | None) -> set[str]:
    """The functions of the code itself: each may wait."""
    nodes = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {n.name for n in ast.walk(tree or ast.Module([], [])) if isinstance(n, nodes)}


def _mentions(statement: ast.stmt, names: Collection[str]) -> bool:
    return any(last_name(each) in names for each in _named(statement))


def _next_read(
    tree: ast.Module | None, line: int, called: str, until: Collection[str] = ()
) -> tuple[str, int]:
    """The tensor that a call is given, and where the code behind it, of one block, reads it.

    Before it waits for anything, or mentions one of the names `until`.
    """
    for statement, *rest in _rests(tree, line, itself=True):
        given = next((ast.unparse(c.args[0]) for c in _calls(statement, called) if c.args), "")
        read = _first_read(rest, given, until)
        if read:
            return given, read
    return "", 0


def _rests(tree: ast.Module | None, line: int, *, itself: bool = False) -> Iterator[list[ast.stmt]]:
    """The statements behind that of a line, in its own block; first that one if `itself`."""
    for block in blocks(tree) if tree is not None else ():
        at = next((i for i, s in enumerate(block) if s.lineno <= line <= (s.end_lineno or 0)), None)
        if at is not None and not hasattr(block[at], "body"):
            yield block[at if itself else at + 1 :]


def _read_after(tree: ast.Module | None, line: int, given: str, until: Collection[str]) -> int:
    """Where the code behind a line, of one block, reads this tensor; 0 for nowhere."""
    found = (_first_read(rest, given, until) for rest in _rests(tree, line))
    return next(filter(None, found), 0)


def _first_read(block: Iterable[ast.stmt], given: str, until: Collection[str]) -> int:
    """The line of the first statement that reads a tensor, 0 if it waits for anything before."""
    for statement in block:
        names = {last_name(call.func) for call in _calls(statement)}
        if not given or names & _WAITING or _mentions(statement, until):
            break
        if any(_is(part, given) for part in _parts_read(statement)):
            return statement.lineno
        if any(_is(n, given) and isinstance(n.ctx, ast.Store) for n in _named(statement)):
            break
    return 0


def _calls(node: ast.AST, called: str = "") -> Iterator[ast.Call]:
    for child in ast.walk(node):
        if isinstance(child, ast.Call) and called in ("", last_name(child.func)):
            yield child


def _named(node: ast.AST) -> Iterator[ast.Name | ast.Attribute]:
    yield from (n for n in ast.walk(node) if isinstance(n, (ast.Name, ast.Attribute)))


def _is(node: ast.AST, given: str) -> bool:
    """True of the tensor, or a part of it."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return ast.unparse(node) == given


def _parts_read(statement: ast.stmt) -> Iterator[ast.AST]:
    """What a statement computes with; not what it hands on."""
    for node in ast.walk(statement):
        parts: Iterable[ast.AST] = ()
        match node:
            case ast.BinOp(left=left, right=right):
                parts = left, right
            case ast.Compare(left=left, comparators=others):
                parts = left, *others
            case ast.AugAssign(value=value) | ast.FormattedValue(value=value):
                parts = (value,)
            case ast.Call(func=func, args=args) if _computes(ast.unparse(func)):
                parts = (
                    *args,
                    *(e for expression in args for e in getattr(expression, "elts", ())),
                )
            case ast.Call(func=ast.Attribute(value=value, attr=attr), args=args) if (
                attr not in _UNREAD
            ):
                parts = (value, *(args if attr in _READING else ()))
            case ast.Call(func=ast.Name(id=name), args=args) if name in _READ_BY:
                parts = args
        yield from parts


def _computes(function: str) -> bool:
    """True of a function of torch's that reads what it is given."""
    of_torch = function.startswith(_COMPUTING) and not function.startswith("torch.distributed.")
    return of_torch and not function.endswith(_UNREAD_BY)


def _counts(each: WorkFacts) -> str:
    words = [f"{each.issued} started, {each.unwaited} never waited for"]
    if each.written:
        words.append(f"{each.written} tensors changed before")
    if each.stepped:
        words.append(f"{each.stepped} gradients used before")
    return "; ".join(words)


def _functional(of: Mapping[int, FunctionalFacts]) -> Iterator[Finding]:
    """More results are left than torch itself may have left: a line of the user's left them."""
    ranks = {rank: model for rank, model in sorted(of.items()) if model.left > model.others}
    if not ranks:
        return
    each = next(iter(ranks.values()))
    at = in_brackets(each.place)
    yield Finding(
        Category.ASYNC_MISUSE,
        tuple(ranks),
        f"results of torch.ops._c10d_functional were never given to wait_tensor{at}: they were "
        "there to be read before the collective had written them",
        "Read torch.ops._c10d_functional.wait_tensor(result), not the result itself; or call "
        "torch.distributed._functional_collectives, whose results wait by themselves.",
        evidence=by_ranks(
            {
                r: f"{e.left} of {e.direct + e.others} results not waited for"
                for r, e in ranks.items()
            }
        ),
    )
