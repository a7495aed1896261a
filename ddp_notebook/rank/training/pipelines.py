"""The one place for the private API of torch's pipelining: schedules, their stages, where they are.

Everything is looked up by name, none of it imports pipelining, and nothing here communicates.
Where a release changes it, nothing is known of pipelines.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from types import FrameType
from typing import Any

import torch.distributed as dist

from ddp_notebook import model
from ddp_notebook.rank.component import Component, Run
from ddp_notebook.rank.inspect.frames import chain

SCHEDULES_MODULE = "torch.distributed.pipelining.schedules"
_CHANGED = (AttributeError, TypeError, ValueError, RuntimeError, KeyError)


def part_of(frame: FrameType | None) -> model.PipelinePart | None:
    """This rank's part in the pipeline whose schedule is on these frames; None without one."""
    for outer in islice(chain(frame), 24):
        if outer.f_globals.get("__name__") != SCHEDULES_MODULE:
            continue
        with contextlib.suppress(*_CHANGED):
            schedule: Any = outer.f_locals["self"]
            single = getattr(schedule, "_stage", None)
            stages = [single] if single is not None else list(schedule._stages)
            group = stages[0].group
            members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
            meant = stages[0].stage_index_to_group_rank.items()
            return model.PipelinePart(
                type(schedule).__name__.removeprefix("Schedule"),
                tuple(int(stage.stage_index) for stage in stages),
                int(stages[0].num_stages),
                int(schedule._n_microbatches),
                tuple(int(stage) for stage, rank in meant if rank == stages[0].group_rank),
                tuple(members),
            )
    return None


def micro_batches(frames: Iterable[FrameType]) -> tuple[int | None, int | None]:
    """The micro-batches whose forward and backward these frames run; None without one."""
    for frame in frames:
        of_schedule = frame.f_globals.get("__name__") == SCHEDULES_MODULE
        if not of_schedule or frame.f_code.co_name not in ("_perform_action", "_step_microbatches"):
            continue
        values = frame.f_locals
        with contextlib.suppress(*_CHANGED):
            if "action" in values:  # of schedules that are lists of actions
                action = values["action"]
                index = action.microbatch_index
                forward = str(action.computation_type).endswith("F")
                return (index, None) if forward else (None, index)
            if "fwd_mb_index" in values:  # 1F1B
                return values["fwd_mb_index"], values["bwd_mb_index"]
            index = values.get("i")
            return (None, index) if "bwd_sends_to_wait" in values else (index, None)
    return None, None


class Pipelines(Component):
    """The parts of this rank in the pipelines of this run, in the order in which they began."""

    def __init__(self) -> None:
        self._parts: list[model.PipelinePart] = []
        self.found: Callable[[], None] = lambda: None
        """Called when this run is seen to have a pipeline."""

    def run_begins(self, run: Run) -> None:
        """Forget the last run."""
        self._parts.clear()

    def see(self, frame: FrameType | None, *_about: object) -> None:
        """Remember the pipeline whose schedule issues a message of a new kind on these frames."""
        if SCHEDULES_MODULE not in sys.modules:
            return
        if len(self._parts) < 8:
            part = part_of(frame)
            if part is not None and part not in self._parts:
                self._parts.append(part)
                self.found()

    def parts(self, stack: Iterable[FrameType]) -> tuple[model.PipelinePart, ...]:
        """All parts; the one in which `stack` is has its current micro-batches."""
        frames = list(stack)
        now = next((p for p in map(part_of, frames[:1]) if p is not None), None)
        forward, backward = micro_batches(frames)
        return tuple(
            replace(part, forward=forward, backward=backward) if part == now else part
            for part in self._parts
        )
