"""What is kept track of stays bounded, however many models a run makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from ddp_notebook.rank.collectives.call_sites import CallSites
from ddp_notebook.rank.inspect.frames import UserCode
from ddp_notebook.rank.training.tracker import Tracker


class Wrapped(SimpleNamespace):
    """Has what a DDP object has, as far as it is tracked."""


def test_models_of_a_run_that_wraps_one_after_another_are_forgotten() -> None:
    tracker = Tracker(CallSites(UserCode()))
    models = [torch.nn.Linear(2, 1) for _ in range(100)]
    wrapped: list[Any] = [Wrapped(module=module, process_group=None) for module in models]
    for each in wrapped:
        tracker.replica(each)
    assert len(tracker.replicas) == 32
    assert len(tracker.modules) <= 32
    assert tracker.inside_of(models[0]) is None
    newest = tracker.inside_of(models[-1])
    assert newest is not None and newest.ref() is wrapped[-1]
