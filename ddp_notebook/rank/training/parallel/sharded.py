"""The models that FSDP2 shards on this rank, as units, found by its collectives."""

from __future__ import annotations

import contextlib
import sys
import weakref
from types import FrameType
from typing import Any

from ddp_notebook import model
from ddp_notebook.rank.component import Component, Run
from ddp_notebook.rank.training.parallel import fsdp_private

_MOST_MODELS = 8
_MOST_UNITS = 512


class Sharded(Component):
    """The sharded models that issued collectives in this run, in the order in which they did."""

    def __init__(self) -> None:
        self._roots: list[weakref.ref[Any]] = []

    def run_begins(self, run: Run) -> None:
        """Forget the last run."""
        self._roots.clear()

    def see(self, frame: FrameType | None) -> None:
        """Remember the model whose FSDP code issues a collective of a new kind on these frames."""
        if fsdp_private.PARAM_GROUP_MODULE not in sys.modules or len(self._roots) >= _MOST_MODELS:
            return
        with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):
            root = fsdp_private.root_of(frame)
            if root is not None and all(known() is not root for known in self._roots):
                self._roots.append(weakref.ref(root))

    def without(self, held: set[int]) -> tuple[int, ...]:
        """The sizes of the parameters of these models; none where one has an id of `held`."""
        roots = [root for known in self._roots if (root := known()) is not None]
        return fsdp_private.without(held, roots)

    def units(self) -> tuple[model.ShardedUnit, ...]:
        """The units of all models, as they are now."""
        found = [
            model.ShardedUnit(number, *unit)
            for number, known in enumerate(self._roots)
            for unit in fsdp_private.units(known())
        ]
        return tuple(found[:_MOST_UNITS])
