"""What the user's code waits for in a loop: a file, a key of a store, a collective, an event.

``while not done.exists(): sleep(1)``, ``while not work.is_completed(): pass``. From the source of
the loop; none of the user's code is called. Of an event loop of asyncio, by what is left in it.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import linecache
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

from ddp_notebook.rank.inspect.frames import UserCode

_MAGIC = re.compile(r"^[ \t]*[%!].*$", re.MULTILINE)


class Polled(NamedTuple):
    """What a loop that does nothing else asks repeatedly; empty for other loops."""

    key: str = ""
    """The key of a store."""
    test: str = ""
    """What is asked about it, as in the source; empty if only whether it exists."""
    collective: bool = False


def polled(frame: FrameType | None, user_code: UserCode) -> Polled:
    """What the user's innermost loop waits for, if it has no other end and does nothing else."""
    frame = _users(frame, user_code)
    loop = _loop(frame) if frame is not None else None
    if frame is None or loop is None:
        return Polled()
    tests = list(_tests(loop))
    asked = [call for test in tests for call in _calls(test)]
    if not tests or not asked or not all(_is_poll(call, frame) for call in asked):
        return Polled()
    call = asked[0]
    if call.func.attr == "is_completed":
        return Polled(collective=True)
    there = call.func.attr == "check" and _is_wanted(loop, tests[0], call)
    return Polled(_key(call, frame), "" if there else ast.unparse(tests[0]))


def polled_file(frame: FrameType | None, user_code: UserCode) -> str:
    """The missing file that the user's innermost loop tests for; "" for none."""
    frame = _users(frame, user_code)
    loop = _loop(frame) if frame is not None else None
    if frame is not None and loop is not None:
        for path in _tested_paths(loop.test, frame):
            if path and not Path(path).exists():
                return path
    return ""


def _users(frame: FrameType | None, user_code: UserCode) -> FrameType | None:
    while frame is not None and not user_code.is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _loop(frame: FrameType) -> ast.While | None:
    """The innermost `while` around the line of a frame."""
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    source = _MAGIC.sub("", source)
    line = frame.f_lineno or 0
    around = [loop for loop in _loops(source) if loop.lineno <= line <= (loop.end_lineno or 0)]
    return max(around, key=lambda loop: loop.lineno, default=None)


@functools.lru_cache(maxsize=8)
def _loops(source: str) -> tuple[ast.While, ...]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.While))


# -- loops that only ask -----------------------------------------------------------------

_PASTIME = ("sleep", "print", "flush", "debug", "info", "warning", "write")
"""Functions that a loop may call between two questions."""
_AROUND = ("all", "any", "len", "int", "bool", "str", "decode")
_OF_STORES = ("check", "get", "add", "num_keys")


class _Poll(ast.Call):
    """A call of a method."""

    func: ast.Attribute


def _tests(loop: ast.While) -> Iterator[ast.expr]:
    """The condition that ends the loop; nothing if the loop does more, or ends by itself."""
    ends: list[ast.expr] = []
    if not (isinstance(loop.test, ast.Constant) and loop.test.value):
        ends.append(loop.test)
    for statement in loop.body:
        match statement:
            case ast.If(test=test, body=[ast.Break() | ast.Return()], orelse=[]):
                ends.append(test)
            case _ if not _passes_time(statement):
                return
    for end in ends:
        parts = end.values if isinstance(end, ast.BoolOp) else [end]
        if not all(any(_calls(part)) for part in parts):
            return  # a number of turns, or a flag that something else may set
    yield from ends


def _passes_time(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(value=ast.Call(func=func)):
            return _name(func) in _PASTIME
        case ast.AugAssign() | ast.Assign():
            return not any(_calls(statement.value))
    return isinstance(statement, ast.Pass | ast.Continue)


def _calls(test: ast.AST) -> Iterator[_Poll]:
    """The calls in a condition whose answer depends on others."""
    for node in ast.walk(test):
        if isinstance(node, ast.Call) and _name(node.func) not in _AROUND:
            yield node  # type: ignore[misc]


def _name(func: ast.expr) -> str:
    return func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")


def _is_poll(call: ast.Call, frame: FrameType) -> bool:
    if not isinstance(call.func, ast.Attribute) or call.keywords:
        return False
    if call.func.attr == "is_completed":
        return not call.args
    asks = call.func.attr in _OF_STORES and bool(call.args or call.func.attr == "num_keys")
    return asks and isinstance(_object(call.func.value, frame), dist.Store)


def _is_wanted(loop: ast.While, test: ast.expr, call: ast.Call) -> bool:
    """True if the loop ends when `call` returns true, not when it returns false."""
    if test is loop.test:
        return isinstance(test, ast.UnaryOp) and test.operand is call
    return test is call


def _key(call: _Poll, frame: FrameType) -> str:
    """The keys that are asked for; as in the source if their values are not known."""
    if not call.args:
        return ast.unparse(call)
    first = call.args[0]
    keys = first.elts if isinstance(first, ast.List | ast.Tuple) else [first]
    return ", ".join(_text(key, frame) for key in keys)


def _text(node: ast.expr, frame: FrameType) -> str:
    match node:
        case ast.Constant(value=value):
            return str(value)
        case ast.JoinedStr(values=parts):
            return "".join(_text(part, frame) for part in parts)
        case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
            return _text(value, frame)
    value = _object(node, frame)
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value[:4]))
    return str(value) if isinstance(value, str | int) else ast.unparse(node)


def _object(node: ast.expr, frame: FrameType) -> Any:
    """The value of a name, or of an attribute of one, in `frame`; None for other expressions."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        return getattr(_object(node.value, frame), "__dict__", {}).get(node.attr)
    return None


# -- files -------------------------------------------------------------------------------


def _tested_paths(test: ast.expr, frame: FrameType) -> list[str]:
    """The values of ``x`` in each ``exists(x)`` and ``x.exists()`` of a loop's condition."""
    paths = []
    for node in ast.walk(test):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
            if _name(node.func) not in ("exists", "isfile", "is_file"):
                continue
            tested: ast.expr | None = node.args[0] if node.args else None
            if tested is None and isinstance(node.func, ast.Attribute):
                tested = node.func.value
            paths.append(_value(tested, frame))
    return paths


def _value(node: ast.expr | None, frame: FrameType) -> str:
    """A path as the source makes it of names and literal texts; none of the user's is called."""
    match node:
        case ast.JoinedStr(values=parts):
            return "".join(_part(part, frame) for part in parts)
        case ast.BinOp(left=left, op=ast.Div() | ast.Add(), right=right):
            return _joined("/" if isinstance(node.op, ast.Div) else "", (left, right), frame)
        case ast.Call(func=func, args=[_, *_] as parts, keywords=[]) if _name(func) in _JOINS:
            return _joined("/", parts, frame)
        case ast.Constant(value=str(text)):
            return text
        case ast.Name() | ast.Attribute():
            value = _object(node, frame)
            return str(value) if isinstance(value, (str, Path)) else ""
    return ""


def _joined(by: str, parts: Sequence[ast.expr], frame: FrameType) -> str:
    """The parts of a path, joined by a slash or by nothing; empty if one is not known."""
    values = [_value(part, frame) for part in parts]
    return by.join(values) if all(values) else ""


_JOINS = ("join", "Path", "joinpath")
"""``os.path.join(a, b)``, ``Path(a, b)``."""


def _part(node: ast.expr, frame: FrameType) -> str:
    """A part of an f-string, if it is a text, a path or a plain number."""
    if isinstance(node, ast.FormattedValue) and node.conversion == -1 and not node.format_spec:
        value = _object(node.value, frame)
        return str(value) if type(value) is int else _value(node.value, frame)
    return _value(node, frame)


# -- event loops ---------------------------------------------------------------------------


def event_loop_at_end(stack: Sequence[FrameType]) -> asyncio.AbstractEventLoop | None:
    """The event loop that these frames run, if it waits and holds nothing that can wake it.

    It has no timer, nothing that is ready, no handler of a signal, and watches no file but its own:
    then only another thread can. asyncio has no public way to ask that.
    """
    for frame in stack[:_MOST_ABOVE]:
        where = frame.f_globals.get("__name__"), frame.f_code.co_name
        if where == ("asyncio.base_events", "_run_once"):
            loop, limit = frame.f_locals.get("self"), frame.f_locals.get("timeout")
            empty = isinstance(loop, asyncio.BaseEventLoop) and _holds_nothing(loop)
            return loop if empty and limit is None else None
    return None


_MOST_ABOVE = 3
"""The frames of a selector, and of this package's, above the one that runs a loop."""


def _holds_nothing(loop: Any) -> bool:
    try:
        watched = set(loop._selector.get_map())
        return watched == {loop._ssock.fileno()} and not (
            loop._ready or loop._scheduled or loop._signal_handlers
        )
    except (AttributeError, TypeError):  # another kind of loop, or a later Python's
        return False


def lines_of_tasks(loop: asyncio.AbstractEventLoop, user_code: UserCode) -> Iterator[str]:
    """Where the unfinished tasks of an event loop wait."""
    for task in sorted(asyncio.all_tasks(loop), key=lambda each: each.get_name()):
        innermost: FrameType | None = None
        awaitable: object = task.get_coro()
        while awaitable is not None:
            frame = getattr(awaitable, "cr_frame", None)
            if frame is not None and user_code.is_users(frame.f_code.co_filename):
                innermost = frame
            awaitable = getattr(awaitable, "cr_await", None)
        if innermost is not None:
            yield f"its task {task.get_name()!r} waits at {user_code.describe(innermost)}"
