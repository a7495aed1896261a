"""torch.nn.DataParallel on this rank: which objects train, and what their errors mean.

It is one process with one model, and knows nothing of other ranks.
"""

from __future__ import annotations

import re
import weakref
from typing import Any

import torch
from torch.nn import DataParallel

from ddp_notebook import model
from ddp_notebook.rank.collectives.call_sites import CallSites, Line, place_of
from ddp_notebook.rank.training.digests import Digester
from ddp_notebook.rank.training.replicas import Tracker

_MOST = 8
_NO_MEMORY = re.compile(r"out of memory|allocate memory", re.IGNORECASE)
OTHER_WAY = (
    "Use DistributedDataParallel: each rank has its own device and loads only its own part of the "
    "batch. torch.nn.DataParallel is one process: it loads the whole batch, copies the model to "
    "every GPU in each step and gathers all outputs on the first; on CPUs it only calls the module."
)


class TrackedDataParallel:
    """One DataParallel object that was called in this run, with gradients."""

    def __init__(self, wrapped: DataParallel[Any], line: Line | None) -> None:
        self.ref = weakref.ref(wrapped)
        self.module = weakref.ref(wrapped.module)
        self.type = type(wrapped.module).__name__
        self.devices = len(wrapped.device_ids)
        self.line = line
        self.steps = 0

    def stepped(self, updated: set[int]) -> None:
        """An optimizer has updated these parameters (by id)."""
        module = self.module()
        if module is not None and any(
            id(parameter) in updated for parameter in module.parameters()
        ):
            self.steps += 1


class DataParallelTracking:
    """All DataParallel objects of this run."""

    def __init__(self, tracker: Tracker, call_sites: CallSites) -> None:
        self._tracker = tracker
        self._call_sites = call_sites
        self.known: dict[int, TrackedDataParallel] = {}

    def begin(self) -> None:
        """Forget the last run."""
        self.known.clear()

    def forward(self, wrapped: DataParallel[Any]) -> None:
        """A DataParallel object is called."""
        if not torch.is_grad_enabled() or len(self.known) >= _MOST:
            return
        known = self.known.get(id(wrapped))
        if known is None or known.ref() is not wrapped:
            self.known[id(wrapped)] = TrackedDataParallel(wrapped, self._call_sites.users_line())

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has made a step. Parameters that a DistributedDataParallel reduces do not
        count."""
        if not self.known:
            return
        reduced = {key for replica in self._tracker.replicas.values() for key in replica.known}
        updated = {
            id(parameter) for group in optimizer.param_groups for parameter in group["params"]
        }
        for known in self.known.values():
            known.stepped(updated - reduced)

    @property
    def trained(self) -> bool:
        """True when this run has trained with one."""
        return any(known.steps for known in self.known.values())

    def facts(self, digester: Digester) -> tuple[model.ParallelFacts, ...]:
        """The objects with which this run has trained."""
        used = [known for known in self.known.values() if known.steps]
        return tuple(
            model.ParallelFacts(
                key=f"{known.type} {number}",
                type=known.type,
                devices=known.devices,
                steps=known.steps,
                parameters=_digests(known, digester),
                place=place_of(known.line),
            )
            for number, known in enumerate(used)
        )

    def cause_of(self, error: BaseException) -> tuple[str, str]:
        """Category and remedy of an error in a run that uses one; empty if it is unrelated."""
        no_memory = isinstance(error, MemoryError) or _NO_MEMORY.search(str(error))
        if not self.known or not no_memory:
            return "", ""
        return model.Category.OOM_ON_ONE_RANK.value, f"Make the batch smaller. {OTHER_WAY}"


def _digests(parallel: TrackedDataParallel, digester: Digester) -> Any:
    module = parallel.module()
    named = module.named_parameters() if module is not None else ()
    return digester.all("parameters of DataParallel", named)
