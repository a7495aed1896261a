"""Prepares ranks that a script itself starts, with torch.multiprocessing."""

from __future__ import annotations

import functools
import os
import sys
from types import ModuleType
from typing import Any

import torch.multiprocessing

_AGENTS_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_STARTS = "start_processes"
"""What `torch.multiprocessing.spawn` and the launchers of other libraries call."""


def expect(script: str, world_size: int) -> None:
    """Prepare for ranks that `script`, one of `world_size`, starts: they can be attached.

    They create their own store: with the variables that torchrun sets for its children, they would
    wait for a store that was never started.
    """
    module = sys.modules.get("torch.multiprocessing.spawn")
    original = getattr(module, _STARTS, None)
    if original is None:
        return

    @functools.wraps(original)
    def start_processes(fn: Any, args: Any = (), nprocs: int = 1, *more: Any, **named: Any) -> Any:
        if world_size > 1:
            what = "a process" if nprocs == 1 else f"{nprocs} processes"
            sys.stderr.write(
                f"{script} starts {what} by itself, on each of {world_size} ranks: if they are "
                f"ranks, that is too many. Run it once: %ddp_run --ranks 0 {script}\n"
            )
        os.environ.pop(_AGENTS_STORE, None)
        os.environ["DDP_NOTEBOOK"] = "1"
        return original(fn, args, nprocs, *more, **named)

    for place in (module, torch.multiprocessing):
        if isinstance(place, ModuleType) and getattr(place, _STARTS, None) is original:
            setattr(place, _STARTS, start_processes)
