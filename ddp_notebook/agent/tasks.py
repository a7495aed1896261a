"""Long tasks of ours on a rank, with progress on the beacon."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from ddp_notebook.agent import beacon, observer
from ddp_notebook.model import CellFinished, CellStarted, Progress


def bench(plan: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Run the benchmark's loop on this rank."""
    loop = importlib.import_module("ddp_notebook.bench.loop")

    def report(done: int, total: int, value: Mapping[str, Any]) -> None:
        beacon.current().emit(Progress, task="bench", done=done, total=total, value=dict(value))

    voice = beacon.current()
    voice.emit(CellStarted, cell=0)
    try:
        with observer.observer.paused():
            result: dict[str, Any] = loop.measure(plan, device, report)
    finally:
        voice.emit(CellFinished, cell=0, outcome="ok")
    return result
