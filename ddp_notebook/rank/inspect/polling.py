"""The thing that a loop of the user's polls for: a file, a key, a collective.

``while not done.exists(): sleep(1)``, ``while not work.is_completed(): pass``. Such a rank runs,
and yet only others can end its loop. Nothing but the loop itself tells that from one that computes,
or that ends by itself; so its source is read, and none of the user's code is called.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

from ddp_notebook import syntax
from ddp_notebook.rank.inspect.frames import UserCode

_MAGIC = re.compile(r"^[ \t]*[%!].*$", re.MULTILINE)
_PASTIME = ("sleep", "print", "flush", "debug", "info", "warning", "write")
"""Functions that a loop may call between two questions."""
_AROUND = ("all", "any", "len", "int", "bool", "str", "decode")
_OF_STORES = ("check", "get", "add", "num_keys")
_OF_FILES = ("exists", "isfile", "is_file")
_JOINS = ("join", "Path", "joinpath")
"""``os.path.join(a, b)``, ``Path(a, b)``."""


class Polled(NamedTuple):
    """Return what a loop that does nothing else asks for repeatedly; empty for other loops."""

    key: str = ""
    """The key of a store."""
    collective: bool = False


def polled(frame: FrameType | None, user_code: UserCode) -> Polled:
    """Return what the user's innermost loop waits for, if it does nothing else and has no end."""
    frame, loop = _users_loop(frame, user_code)
    if frame is None or loop is None:
        return Polled()
    asked = [call for test in _tests(loop) for call in _calls(test)]
    # All of them: `while not (store.check(...) or user_function())` may end by what the rank does.
    if not asked or not all(_is_poll(call, frame) for call in asked):
        return Polled()
    call = asked[0]
    if _name(call.func) == "is_completed":
        return Polled(collective=True)
    first = call.args[0] if call.args else call
    keys = first.elts if isinstance(first, ast.List | ast.Tuple) else [first]
    return Polled(", ".join(_value(key, frame) or ast.unparse(key) for key in keys))


def polled_file(frame: FrameType | None, user_code: UserCode) -> str:
    """Return the missing file that the user's innermost loop tests for; "" for none."""
    frame, loop = _users_loop(frame, user_code)
    if frame is None or loop is None:
        return ""
    for node in ast.walk(loop.test):
        if isinstance(node, ast.Call) and _name(node.func) in _OF_FILES:
            of = node.func.value if isinstance(node.func, ast.Attribute) else None
            path = _value(node.args[0] if node.args else of, frame)
            if path and not Path(path).exists():
                return path
    return ""


def _users_loop(
    frame: FrameType | None, user_code: UserCode
) -> tuple[FrameType | None, ast.While | None]:
    """Return the innermost frame of the user's, and the innermost `while` around its line."""
    while frame is not None and not user_code.is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return None, None
    # Without the magics of a cell, which are no Python; lines keep their numbers.
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    line = frame.f_lineno or 0
    loops = _loops(_MAGIC.sub("", source))
    around = [loop for loop in loops if loop.lineno <= line <= (loop.end_lineno or 0)]
    return frame, max(around, key=lambda loop: loop.lineno, default=None)


@functools.lru_cache(maxsize=8)
def _loops(source: str) -> tuple[ast.While, ...]:
    try:
        tree = syntax.parse(source)
    except (SyntaxError, ValueError):
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.While))


def _tests(loop: ast.While) -> Sequence[ast.expr]:
    """Return the conditions that end a loop; none if it does more, or may end by itself."""
    ends: list[ast.expr] = []
    if not (isinstance(loop.test, ast.Constant) and loop.test.value):
        ends.append(loop.test)
    for statement in loop.body:
        match statement:
            case ast.If(test=test, body=[ast.Break() | ast.Return()], orelse=[]):
                ends.append(test)
            case ast.Expr(value=ast.Call(func=func)) if _name(func) in _PASTIME:
                pass
            case ast.AugAssign() | ast.Assign() if not any(_calls(statement.value)):
                pass
            case ast.Pass() | ast.Continue():
                pass
            case _:
                return ()
    for end in ends:
        parts = end.values if isinstance(end, ast.BoolOp) else [end]
        if not all(any(_calls(part)) for part in parts):
            return ()  # a number of turns, or a flag that something else may set
    return ends


def _calls(test: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls in a condition whose answer depends on others."""
    for node in ast.walk(test):
        if isinstance(node, ast.Call) and _name(node.func) not in _AROUND:
            yield node


def _name(func: ast.expr) -> str:
    return func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")


def _is_poll(call: ast.Call, frame: FrameType) -> bool:
    if not isinstance(call.func, ast.Attribute) or call.keywords:
        return False
    if call.func.attr == "is_completed":
        return not call.args
    asks = call.func.attr in _OF_STORES and bool(call.args or call.func.attr == "num_keys")
    return asks and isinstance(_object(call.func.value, frame), dist.Store)


def _object(node: ast.expr, frame: FrameType) -> Any:
    """Return the value of a name, or of an attribute of one; None for other expressions."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        return getattr(_object(node.value, frame), "__dict__", {}).get(node.attr)
    return None


def _value(node: ast.expr | None, frame: FrameType) -> str:
    """Return a text or path that the source makes of names and literals; "" if it needs a call."""
    match node:
        case ast.JoinedStr(values=parts):
            return "".join(_value(part, frame) for part in parts)
        case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
            number = _object(value, frame)
            return str(number) if type(number) is int else _value(value, frame)
        case ast.BinOp(left=left, op=ast.Div() | ast.Add() as op, right=right):
            values = [_value(left, frame), _value(right, frame)]
            return ("/" if isinstance(op, ast.Div) else "").join(values) if all(values) else ""
        case ast.Call(func=func, args=[_, *_] as parts, keywords=[]) if _name(func) in _JOINS:
            values = [_value(part, frame) for part in parts]
            return "/".join(values) if all(values) else ""
        case ast.Constant(value=str(text)):
            return text
        case ast.Name() | ast.Attribute():
            value = _object(node, frame)
            return str(value) if isinstance(value, (str, Path)) else ""
    return ""
