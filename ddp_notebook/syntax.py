"""Python source as a tree, made by one thread at a time.

Python 3.11 counts the depth of every tree that it makes in one place. Where the garbage collector
runs code meanwhile, another thread may begin a tree, and then the first one ends in a SystemError,
"AST constructor recursion depth mismatch": https://github.com/malthe/chameleon/issues/361
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_LOCK = threading.RLock()


def parse(source: str | bytes, file: str = "<unknown>", mode: str = "exec") -> Any:
    """As `ast.parse`."""
    return alone(lambda: ast.parse(source, file, mode))


def alone(make: Callable[[], T]) -> T:
    """Return what `make` gives, in which a tree is made; no other thread of ours makes one then."""
    # Not forever: `make` may run code of the user's, and a fork has no thread that gives it back.
    held = _LOCK.acquire(timeout=1.0)
    try:
        try:
            return make()
        except SystemError:  # code that is not ours makes trees, too
            return make()
    finally:
        if held:
            _LOCK.release()
