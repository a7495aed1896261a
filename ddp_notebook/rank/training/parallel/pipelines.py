"""The pipelines in which this rank has stages, found by their sends and receives."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import FrameType

from ddp_notebook import model
from ddp_notebook.rank.component import Component, Run
from ddp_notebook.rank.training.parallel import pipelining_private

_MOST_PARTS = 8


class Pipelines(Component):
    """The parts of this rank in the pipelines of this run, in the order in which they began."""

    def __init__(self) -> None:
        self._parts: list[model.PipelinePart] = []
        self.found: Callable[[], None] = lambda: None
        """Called when this run is seen to have a pipeline."""

    def run_begins(self, run: Run) -> None:
        """Forget the last run."""
        self._parts.clear()

    def see(self, frame: FrameType | None) -> None:
        """Remember the pipeline whose schedule issues a message of a new kind on these frames."""
        if pipelining_private.SCHEDULES_MODULE not in sys.modules:
            return
        if len(self._parts) < _MOST_PARTS:
            part = pipelining_private.part_of(frame)
            if part is not None and part not in self._parts:
                self._parts.append(part)
                self.found()

    def parts(self, stack: Iterable[FrameType]) -> tuple[model.PipelinePart, ...]:
        """All parts; the one in which `stack` is has its current micro-batches."""
        frames = list(stack)
        now = next((p for p in map(pipelining_private.part_of, frames[:1]) if p is not None), None)
        forward, backward = pipelining_private.micro_batches(frames)
        return tuple(
            replace(part, forward=forward, backward=backward) if part == now else part
            for part in self._parts
        )
