"""Rules about collectives that were started, and whose end was not waited for."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.majority import by_ranks
from ddp_notebook.diagnosis.source_code.conditions import last_name
from ddp_notebook.model import Category, Finding, FunctionalFacts, WorkFacts, in_brackets

_SENDS = ("isend", "send")
_WAITING = frozenset({"wait", "barrier", "monitored_barrier", "synchronize", "is_completed"})
_UNREAD = frozenset({"size", "numel", "dim", "element_size", "data_ptr", "detach", "is_contiguous"})
"""Methods that do not read the values of a tensor."""
_READ_BY = frozenset({"float", "int", "bool", "print"})
_WAIT = "Keep every handle, and call its wait() before the tensor is used."


def unwaited(context: Context) -> Iterator[Finding]:
    """A tensor was changed, or gradients used, while a collective may still have been at work."""
    lines: dict[tuple[str, str], dict[int, WorkFacts]] = {}
    read: dict[tuple[str, str], dict[int, WorkFacts]] = {}
    for rank, facts in sorted(context.facts.items()):
        for each in facts.works:
            of = lines if each.written or each.stepped else read
            of.setdefault((str(each.place), each.operation), {})[rank] = each
    for those in lines.values():
        yield _misused(those)
    for those in read.values():
        yield from _read_at_once(context, those)
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


def _next_read(tree: ast.Module | None, line: int, called: str) -> tuple[str, int]:
    """The tensor that a call is given, and where the code behind it, of one block, reads it."""
    for block in _blocks(tree) if tree is not None else ():
        at = next((i for i, s in enumerate(block) if s.lineno <= line <= (s.end_lineno or 0)), None)
        if at is None or hasattr(block[at], "body"):
            continue
        given = next((ast.unparse(c.args[0]) for c in _calls(block[at], called) if c.args), "")
        for statement in block[at + 1 :]:
            names = {last_name(call.func) for call in _calls(statement)}
            if not given or names & _WAITING:
                break
            if any(_is(part, given) for part in _parts_read(statement)):
                return given, statement.lineno
            if any(_is(n, given) and isinstance(n.ctx, ast.Store) for n in _named(statement)):
                break
    return "", 0


def _blocks(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield block


def _calls(node: ast.AST, called: str = "") -> Iterator[ast.Call]:
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and called in ("", last_name(each.func)):
            yield each


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
            case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr not in _UNREAD:
                parts = (value,)
            case ast.Call(func=ast.Name(id=name), args=args) if name in _READ_BY:
                parts = args
        yield from parts


def _counts(each: WorkFacts) -> str:
    words = [f"{each.issued} started, {each.unwaited} never waited for"]
    if each.written:
        words.append(f"{each.written} tensors changed before")
    if each.stepped:
        words.append(f"{each.stepped} gradients used before")
    return "; ".join(words)


def _functional(of: Mapping[int, FunctionalFacts]) -> Iterator[Finding]:
    """More results are left than torch itself may have left: a line of the user's left them."""
    ranks = {rank: each for rank, each in sorted(of.items()) if each.left > each.others}
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
