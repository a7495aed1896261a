"""The one place for the private API of torch's pipelining: schedules, their stages, where they are.

Everything is looked up by name, none of it imports pipelining, and nothing here communicates.
Where a release changes it, nothing is known of pipelines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch.distributed as dist

from ddp_notebook import model

SCHEDULES_MODULE = "torch.distributed.pipelining.schedules"
_MOST_FRAMES = 24
_CHANGED = (AttributeError, TypeError, ValueError, RuntimeError, KeyError)


def part_of(frame: FrameType | None) -> model.PipelinePart | None:
    """This rank's part in the pipeline whose schedule is on these frames; None without one."""
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return None
        if frame.f_globals.get("__name__") == SCHEDULES_MODULE:
            with contextlib.suppress(*_CHANGED):
                return _part(frame.f_locals["self"])
        frame = frame.f_back
    return None


def _part(schedule: Any) -> model.PipelinePart:
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


def micro_batches(frames: Iterable[FrameType]) -> tuple[int | None, int | None]:
    """The micro-batches whose forward and backward these frames run; None without one."""
    for frame in frames:
        if frame.f_globals.get("__name__") == SCHEDULES_MODULE:
            with contextlib.suppress(*_CHANGED):
                found = _micro_batches(frame.f_code.co_name, frame.f_locals)
                if found is not None:
                    return found
    return None, None


def _micro_batches(function: str, values: dict[str, Any]) -> tuple[int | None, int | None] | None:
    if function == "_perform_action":  # of schedules that are lists of actions
        action = values["action"]
        index = action.microbatch_index
        forward = str(action.computation_type).endswith("F")
        return (index, None) if forward else (None, index)
    if function != "_step_microbatches":
        return None
    if "fwd_mb_index" in values:  # 1F1B
        return values["fwd_mb_index"], values["bwd_mb_index"]
    index = values.get("i")
    return (None, index) if "bwd_sends_to_wait" in values else (index, None)
