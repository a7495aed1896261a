"""The files and folders that this process has written, made or removed in this run: the last ones.

Another rank may miss what this one has removed, has made later, or has made elsewhere.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ddp_notebook.rank.component import Component, Run

_MOST = 24
_CHANGES: Mapping[str, str] = {
    "open": "written",
    "os.mkdir": "made",
    "os.remove": "removed",
    "os.rename": "removed",
    "os.rmdir": "removed",
    "shutil.rmtree": "removed",
}
"""By the names of Python's audit events."""


class PathsChanged(Component):
    """Hears of changes from Python's audit events, and from torch.save, which writes in C++."""

    def __init__(self) -> None:
        self._changes: dict[tuple[str, str], None] = {}

    def attach(self) -> None:
        """Listen from now on."""
        # A hook cannot be taken away again, and hears of all that is audited: imports, frames
        # looked at, each file opened. So it looks a name up, and does more for changes alone. What
        # it raises would end the user's call.
        note = self._note

        def hear(event: str, args: tuple[Any, ...]) -> None:
            if event in _CHANGES:
                try:
                    note(event, args)
                except Exception:  # noqa: BLE001  # a path of the user's own class
                    return

        sys.addaudithook(hear)
        save = torch.save

        @functools.wraps(save)
        def saves(obj: Any, f: Any, *args: Any, **named: Any) -> None:
            __tracebackhide__ = True
            save(obj, f, *args, **named)
            if isinstance(f, (str, os.PathLike)):
                hear("open", (f, "w", 0))

        torch.save = torch.serialization.save = saves

    def run_begins(self, run: Run) -> None:
        """Forget what the last run changed."""
        self._changes.clear()

    def last(self) -> list[tuple[str, str]]:
        """Return the last changes of this run: what was done to which path, the newest last."""
        return list(self._changes)[-_MOST:]

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        path = args[0]
        if event == "open":
            _, mode, flags = args
            creates = isinstance(flags, int) and flags & os.O_CREAT
            if not (mode[:1] != "r" if isinstance(mode, str) else creates):
                return
        within = args[-1] if event in ("os.mkdir", "os.remove", "os.rmdir") else -1
        if isinstance(path, int) or within != -1:
            return  # a descriptor, or a name in a folder of which that alone is known
        self._add(_CHANGES[event], path)
        if event == "os.rename":
            self._add("written", args[1])

    def _add(self, what: str, path: Any) -> None:
        change = what, str(Path(os.fsdecode(path)).absolute())
        self._changes.pop(change, None)
        self._changes[change] = None
        if len(self._changes) > 2 * _MOST:
            self._changes.pop(next(iter(self._changes)), None)
