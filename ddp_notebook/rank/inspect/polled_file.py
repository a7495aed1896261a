"""The file that the user's code waits for in a loop: ``while not done.exists(): sleep(1)``."""

from __future__ import annotations

import ast
import contextlib
import linecache
from pathlib import Path
from types import FrameType

from ddp_notebook.rank.inspect.frames import UserCode


def polled_file(frame: FrameType | None, user_code: UserCode) -> str:
    """The file that does not exist and that the user's innermost loop tests for; "" for none.

    Read off the source of the loop; nothing of the user's is called.
    """
    while frame is not None and not user_code.is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    source = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    with contextlib.suppress(SyntaxError, ValueError):
        for loop in ast.walk(ast.parse("".join(source))):
            if isinstance(loop, ast.While) and loop.lineno <= frame.f_lineno <= _last(loop):
                for path in _tested_paths(loop.test, frame):
                    if path and not Path(path).exists():
                        return path
    return ""


def _last(loop: ast.While) -> int:
    return loop.end_lineno or loop.lineno


def _tested_paths(test: ast.expr, frame: FrameType) -> list[str]:
    """The values of ``x`` in each ``exists(x)`` and ``x.exists()`` of a loop's condition."""
    paths = []
    for node in ast.walk(test):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if name not in ("exists", "isfile", "is_file"):
                continue
            tested: ast.expr | None = node.args[0] if node.args else None
            if tested is None and isinstance(node.func, ast.Attribute):
                tested = node.func.value
            paths.append(_value(tested, frame))
    return paths


def _value(node: ast.expr | None, frame: FrameType) -> str:
    """The value of a name or a text in `frame`; nothing is called or computed."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Name):
        value = frame.f_locals.get(node.id, frame.f_globals.get(node.id))
        return str(value) if isinstance(value, (str, Path)) else ""
    return ""
