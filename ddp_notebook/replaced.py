"""What code in the notebook's process has replaced of Python's own, where a verb fails for it.

`json.dumps = None` or an own `builtins.open` is the user's affair, but Jupyter and what it loads
use the same ones: an error deep inside says nothing to a reader.
"""

from __future__ import annotations

import builtins
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_MODULES: tuple[ModuleType, ...] = (
    *(builtins, json, os, os.path, pathlib, select, signal, socket, subprocess, tempfile),
    *(threading, time),
)
_JUPYTERS = frozenset({"input", "exit", "quit", "display"})
"""Jupyter itself replaces these."""
_BEFORE = {
    (module, name): value
    for module in _MODULES
    for name, value in vars(module).items()
    if callable(value) and not name.startswith("_") and name not in _JUPYTERS
}
_MOST = 3


def why(error: BaseException) -> str:
    """What was replaced that this error may come from; empty where nothing was.

    That is what cannot be called any more, and functions that the error passed through.
    """
    codes = {frame.f_code for each in _chain(error) for frame in _frames(each)}
    types = any(isinstance(each, (TypeError, AttributeError)) for each in _chain(error))
    found = []
    for (module, name), before in _BEFORE.items():
        now = vars(module).get(name)
        if now is before:
            continue
        if (types and not callable(now)) or getattr(now, "__code__", None) in codes:
            found.append(f"{module.__name__}.{name}")
    if not found:
        return ""
    names = ", ".join(found[:_MOST]) + (" and others" if len(found) > _MOST else "")
    was = "was" if len(found) == 1 else "were"
    return (
        f"In the notebook's process {names} {was} replaced, which Jupyter and this package use. "
        f"Set {'it' if was == 'was' else 'them'} back as before, or restart the kernel."
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it came from."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def _frames(error: BaseException) -> Iterator[Any]:
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next
