"""Which files this rank has written with torch.save, and after how many of its collectives."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ddp_notebook import model
from ddp_notebook.model import Place
from ddp_notebook.rank.collectives.call_sites import CallSites, Line
from ddp_notebook.rank.training.parallel import fsdp_private, meshes

_MOST_PATHS, _MOST_MOMENTS = 64, 16
_MOST_LEAVES, _DEEPEST = 4000, 6


class Saves:
    """The files of this run."""

    def __init__(self, call_sites: CallSites, issued: Callable[[], int]) -> None:
        self._call_sites = call_sites
        self._issued = issued
        self.begin()

    def begin(self) -> None:
        """Forget the files of the last run."""
        self._moments: dict[str, list[int]] = {}
        self._lines: dict[str, Line | None] = {}
        self._shards: dict[str, model.Shards | None] = {}

    def attach(self, off: Callable[[], bool]) -> None:
        """Record every file from now on."""
        original = torch.save

        @functools.wraps(original)
        def save(obj: Any, f: Any, *args: Any, **named: Any) -> Any:
            __tracebackhide__ = True
            moment = 0 if off() else self._issued()
            result = original(obj, f, *args, **named)
            if moment and not off():
                self._saved(obj, f, moment)
            return result

        torch.save = save

    def _saved(self, obj: Any, target: Any, moment: int) -> None:
        name = getattr(target, "name", target)
        if not isinstance(name, str | os.PathLike):
            return
        path = os.path.realpath(os.fspath(name))
        full = len(self._moments) >= _MOST_PATHS and path not in self._moments
        if full or not Path(path).is_file():
            return
        self._lines.setdefault(path, self._call_sites.users_line())
        with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):
            owners = (unit.tensor for unit in fsdp_private.held_by_units().values())
            shards = meshes.shards_in(islice(_leaves(obj), _MOST_LEAVES), owners)
            self._shards.setdefault(path, shards)
        moments = self._moments.setdefault(path, [])
        if len(moments) < _MOST_MOMENTS:
            moments.append(moment)

    def facts(self) -> tuple[model.SaveFacts, ...]:
        """The files, in the order in which they were first written."""
        return tuple(
            model.SaveFacts(
                path,
                tuple(moments),
                Place(*line) if (line := self._lines[path]) else None,
                self._shards.get(path),
            )
            for path, moments in self._moments.items()
        )


def _leaves(value: Any, name: str = "", depth: int = _DEEPEST) -> Iterator[tuple[str, Any]]:
    """The leaves of nested dictionaries and lists, each with the key of its innermost one."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth and isinstance(value, Mapping):
        for key, each in list(value.items()):
            yield from _leaves(each, str(key), depth - 1)
    elif depth and isinstance(value, tuple | list):
        for each in value:
            yield from _leaves(each, name, depth - 1)
