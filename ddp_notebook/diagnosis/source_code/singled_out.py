"""The rank that code treats in a way of its own: where two ranks differ, which one diverges."""

from __future__ import annotations

import ast
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping

from ddp_notebook.diagnosis.majority import outvoted
from ddp_notebook.diagnosis.source_code.conditions import Test, last_name
from ddp_notebook.diagnosis.source_code.names import Names
from ddp_notebook.diagnosis.source_code.sources import Sources
from ddp_notebook.model import Ranks


def singled_out(sources: Sources, words: Container[str], ranks: Ranks) -> Ranks:
    """The one of `ranks` for which alone the code sets or calls something of these names.

    ``if rank == 1:`` without an else tells it, and ``lr=0.1 if rank == 1 else 0.2``. Of ``0.1 if
    rank == 0 else 0.2`` either may be meant. Empty where no test, or not just one, tells it.
    """
    found: set[Ranks] = set()
    size = max(ranks, default=0) + 1
    for tree in sources.known():
        names = Names(tree)
        for test in _tests(tree, words):
            asked = [test]
            if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
                asked = test.values
            parts = [Test(part, part.lineno) for part in asked]
            # Of the ranks on which no part of the test is known not to hold.
            own = tuple(r for r in ranks if all(names.lets(part, r, size) for part in parts))
            if len(own) == 1:
                found.add(own)
    return found.pop() if len(found) == 1 else ()


def strayed(sources: Sources, values: Mapping[int, Hashable], words: Container[str]) -> Ranks:
    """The ranks whose value is not that of most; of two ranks the one that is singled out.

    All of them where no value has the most, and the code tells nothing.
    """
    ranks = outvoted(values)
    two = len(ranks) == len(values) == 2
    return (singled_out(sources, words, ranks) if two else ()) or ranks


def _tests(tree: ast.AST, words: Container[str]) -> Iterator[ast.expr]:
    """The tests that decide on what is set or called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If):
            if _sets(node.body, words) and not _sets(node.orelse, words):
                yield node.test
        elif not isinstance(node, (ast.stmt, ast.withitem)) or hasattr(node, "body"):
            continue
        elif _sets([node], words):
            yield from _choices(node)


def _choices(node: ast.AST) -> Iterator[ast.expr]:
    """Yield tests that choose a value by ``== 1``, or are the value: ``enabled=rank == 1``."""
    for child in ast.walk(node):
        match child:
            case ast.IfExp(test=test) | ast.keyword(value=ast.Compare() | ast.BoolOp() as test):
                equals = [n for n in ast.walk(test) if isinstance(n, ast.Compare)]
                sides = [s for e in equals if isinstance(e.ops[0], ast.Eq) for s in ast.walk(e)]
                # Not of ``== 0``: rank 0 is often asked for to tell it from all others.
                if any(isinstance(s, ast.Constant) and s.value not in (0, "0") for s in sides):
                    yield test


def _sets(nodes: Iterable[ast.AST], words: Container[str]) -> bool:
    """True where something of such a name gets a value, is an argument, or is called."""
    for node in nodes:
        for child in ast.walk(node):
            match child:
                case ast.Assign(targets=targets):
                    names = [*map(_target, targets)]
                case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                    names = [_target(target)]
                case ast.keyword(arg=str(name)):
                    names = [name]
                case ast.Call(func=func):
                    names = [last_name(func)]
                case _:
                    continue
            if any(name in words for name in names):
                return True
    return False


def _target(target: ast.expr) -> str:
    """Return ``lr`` of ``lr``, ``config.lr`` and ``group["lr"]``."""
    match target:
        case ast.Subscript(slice=ast.Constant(value=str(key))):
            return key
    return last_name(target)
