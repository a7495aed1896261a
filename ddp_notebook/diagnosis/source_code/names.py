"""The value of a test in the code on each rank: the same on all, of its own, by its number.

A main guard, `dist.is_initialized()` or a step's number never say why one rank is at a line and
another is not. A test of the rank can be worked out for each rank, and so says whether it does.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from functools import partial
from typing import Any

from ddp_notebook.diagnosis.source_code.conditions import Test, last_name

_RANK = re.compile(r"rank|is_(main|master|coordinator)|main_process", re.IGNORECASE)
_SHARED = re.compile(
    r"initialized|is_(\w+_)?available|is_dist|distributed$|get_world_size|get_backend|elastic"
)
"""Functions that answer the same on every rank."""
_SIZE = re.compile(r"(.*_)?world_?size|nprocs|num_(processes|ranks)", re.IGNORECASE)
_CONFIGURED = re.compile(r"\b(args|cfg|conf|config|opts?|hparams|settings|flags)\b|distributed|ddp")
"""Names of what is set before a run, mostly the same on all ranks."""
_AGREEING = (
    *("all_reduce", "broadcast", "broadcast_object_list"),
    *("all_gather", "all_gather_object", "all_gather_into_tensor"),
)
"""Collectives that give their first argument the same value on every rank."""
_PURE = ("int", "float", "str", "bool", "len", "max", "min", "abs", "range")
_DEEPEST = 6
"""So many names are looked up one behind the other."""


class Varies(IntEnum):
    """How likely a test differs between ranks."""

    NEVER = 0
    CONFIGURED = 1
    IN_PART = 2
    """By the rank, but not as the ranks differ: another test must decide the rest."""
    LOCAL = 3
    BY_RANK = 4
    JUST_SO = 5
    """By the rank, and just as the ranks differ."""


class Names:
    """The values that the names of a file stand for, where they are bound once."""

    def __init__(self, tree: ast.Module | None = None) -> None:
        self._changes: dict[str, list[tuple[int, bool]]] = {}
        """Where a name gets a value; true where a collective gives all ranks the same one."""
        values: dict[str, ast.expr | ast.FunctionDef] = {}
        bound: Counter[str] = Counter()
        for node in ast.walk(tree) if tree else ():
            match node:  # a value that is plain to see
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    values[name] = value
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    values[name] = value
                case ast.For(
                    target=ast.Name(id=name), iter=ast.Call(func=ast.Name(id="range")) as steps
                ):
                    values[name] = steps
                case ast.For(
                    target=ast.Tuple(elts=[ast.Name(id=name), *_]),
                    iter=ast.Call(func=ast.Name(id="enumerate")),
                ):
                    values[name] = ast.Constant(0)
                case ast.FunctionDef(name=name, args=ast.arguments(args=[], kwonlyargs=[])):
                    values[name] = node
            for name, agreed in _changes_in(node):
                self._changes.setdefault(name, []).append((getattr(node, "lineno", 0), agreed))
                bound[name] += not agreed
        self._values = {name: value for name, value in values.items() if bound[name] == 1}

    def varies(self, test: ast.AST, depth: int = 0) -> Varies:
        """How likely this differs between ranks."""
        # Whatever has "rank" in its text is taken to differ by rank. The rest differs unless it is
        # known to be the same: a constant, the size of the world, what a collective has just given
        # to all. In doubt a test may differ, since it only has to say why ranks did, never that.
        text = ast.unparse(test)
        if _RANK.search(text):
            return Varies.BY_RANK
        found = max((self._of_part(part, depth) for part in _parts(test)), default=Varies.NEVER)
        calls = any(isinstance(node, ast.Call) for node in ast.walk(test))
        if found is Varies.LOCAL and not calls and _CONFIGURED.search(text):
            return Varies.CONFIGURED
        return found

    def _of_part(self, part: ast.AST, depth: int) -> Varies:
        # What a collective of all ranks gave its value, in a line before, is the same on all.
        line = getattr(part, "lineno", 0)
        before = [change for change in self._changes.get(_root(part), ()) if change[0] < line]
        if _is_shared(part) or (before and max(before)[1]):
            return Varies.NEVER
        value = self._value_of(part)
        if value is None or depth > _DEEPEST:
            return Varies.LOCAL
        if not isinstance(value, ast.FunctionDef):
            return self.varies(value, depth + 1)
        asked = list(_asked_in(value))
        if None in asked:
            return Varies.LOCAL
        return max((self.varies(test, depth + 1) for test in asked if test), default=Varies.NEVER)

    def _value_of(self, part: ast.AST) -> ast.expr | ast.FunctionDef | None:
        """Return what a name stands for, or the function that a call without arguments calls."""
        match part:
            case ast.Name(id=name) if not isinstance(self._values.get(name), ast.FunctionDef):
                return self._values.get(name)
            case ast.Call(func=ast.Name(id=name), args=[], keywords=[]):
                value = self._values.get(name)
                return value if isinstance(value, ast.FunctionDef) else None
        return None

    def decides(self, test: Test, reached: Mapping[int, bool]) -> Varies:
        """How likely the test is why just these ranks reached its line, and others did not."""
        varies = self.varies(test.test)
        if varies is not Varies.BY_RANK or len(set(reached.values())) < 2:
            return varies
        try:
            values = {rank: bool(self._on(test.test, rank, max(reached) + 1)) for rank in reached}
        except (ValueError, TypeError, ArithmeticError):
            return varies
        # Worked out for each rank, a test of the rank is more than likely: if it lets through just
        # those that came, it is why they came alone. If it lets through others as well, it is not.
        just_so = all((value is test.wanted) is reached[rank] for rank, value in values.items())
        return Varies.JUST_SO if just_so else Varies.IN_PART

    def lets(self, test: Test, rank: int, size: int) -> bool:
        """False when the test keeps this rank away; True also where that is not known."""
        try:
            return bool(self._on(test.test, rank, size)) is test.wanted
        except (ValueError, TypeError, ArithmeticError):
            return True

    def _on(self, test: ast.expr, rank: int, size: int, depth: int = 0) -> Any:
        """Work out the value of this on a rank. Raises ValueError where that is not known."""
        name = _key(test) or last_name(test)
        if isinstance(test, ast.Call) and not (test.args or test.keywords):
            name = last_name(test.func).removeprefix("get_")
        if name.lower() in ("rank", "local_rank", "global_rank"):
            return rank
        if _names_the_size(name):
            return size
        value = self._value_of(test)
        if isinstance(value, ast.FunctionDef):
            last = value.body[-1]
            value = last.value if len(value.body) == 1 and isinstance(last, ast.Return) else None
        if value is not None and depth < _DEEPEST:
            return self._on(value, rank, size, depth + 1)
        # No code of the user's is run: only operators that cannot loop, print or grow for ever.
        of = partial(self._on, rank=rank, size=size, depth=depth)
        match test:
            case ast.Constant(value=constant):
                return constant
            case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
                return tuple(map(of, parts))
            case ast.BoolOp(op=op, values=parts):
                return all(map(of, parts)) if isinstance(op, ast.And) else any(map(of, parts))
            case ast.Call(func=ast.Name(id="int" | "bool"), args=[part]):
                return int(of(part))
            case ast.UnaryOp(op=op, operand=part) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](of(part))
            case ast.BinOp(left=one, op=op, right=other) if type(op) in _OPERATORS:
                first = of(one)
                if isinstance(first, str | bytes) and isinstance(op, ast.Mod):
                    raise ValueError("a text that is filled in may become as long as it likes")
                return _OPERATORS[type(op)](first, of(other))
            case ast.Compare(left=one, ops=[op], comparators=[other]) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](of(one), of(other))
        raise ValueError(ast.unparse(test))


def _changes_in(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield the names that get a value here, whatever it is.

    True for the name that a collective of the default group gives the same value on all ranks.
    """
    match node:
        case ast.Name(id=name, ctx=ast.Store()):
            yield name, False
        case ast.Call(func=func, args=[first, *rest]) if last_name(func) in _AGREEING:
            named = any(keyword.arg == "group" for keyword in node.keywords)
            if len(rest) < 2 and not named and (name := _root(first)):
                yield name, True
        case _:
            names = (getattr(node, field, None) for field in ("arg", "asname", "name"))
            yield from ((name, False) for name in names if isinstance(name, str))


def _root(part: ast.AST) -> str:
    """``stop`` of ``stop``, ``stop[0]`` and ``stop.item()``."""
    match part:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value) | ast.Subscript(value=value):
            return _root(value)
        case ast.Call(func=ast.Attribute(value=value)):
            return _root(value)
    return ""


def _asked_in(function: ast.FunctionDef) -> Iterator[ast.expr | None]:
    """Yield the tests and results of a function; None for anything else that it does."""
    for node in ast.walk(function):
        match node:
            case ast.Return(value=value):
                yield value or ast.Constant(None)
            case ast.If(test=test):
                yield test
            case ast.stmt() if node is not function:
                is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                yield ast.Constant(None) if is_text else None


# -- parts of a test ---------------------------------------------------------------------


def _parts(test: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a test, down to names, attributes, subscripts and calls."""
    match test:
        case ast.Call(func=ast.Name(id=name), args=[_, *_]) if name in _PURE:
            for argument in test.args:
                yield from _parts(argument)
        case ast.Name() | ast.Attribute() | ast.Subscript() | ast.Call() | ast.Constant():
            yield test
        case ast.expr():
            for node in ast.iter_child_nodes(test):
                yield from _parts(node)


def _is_shared(part: ast.AST) -> bool:
    """True of what is the same on every rank."""
    match part:
        case ast.Constant():
            return True
        case ast.Call(func=func) if _SHARED.search(last_name(func)):
            return True
        case ast.Name() | ast.Attribute():
            name = last_name(part)
            return name.startswith("__") or name.isupper() or _names_the_size(name)
    return _names_the_size(_key(part))


def _names_the_size(name: str) -> bool:
    return name == "world" or _SIZE.fullmatch(name) is not None


def _key(part: ast.AST) -> str:
    """``RANK`` of ``os.environ["RANK"]``, of ``os.getenv("RANK")`` and the like."""
    match part:
        case ast.Subscript(slice=ast.Constant(value=str(key))):
            return key
        case ast.Call(args=[ast.Constant(value=str(key)), *_]):
            return key
    return ""


_Operator = type[ast.operator] | type[ast.cmpop] | type[ast.unaryop]
_OPERATORS: Mapping[_Operator, Callable[..., Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
    ast.BitAnd: operator.and_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}
