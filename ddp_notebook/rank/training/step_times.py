"""The parts of this rank's newest training steps: its own, and where it waited.

A step ends where the rank has reduced its gradients with the others: at the end of a backward
that handed over buckets or, where no backward does, at an optimizer's step after a collective.
"""

from __future__ import annotations

import os
import socket
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from ddp_notebook.model import StepPart, StepTimes, TimedStep
from ddp_notebook.model.collective_log import Waited
from ddp_notebook.rank.training import step_marks

if TYPE_CHECKING:
    from ddp_notebook.rank.collectives.observer import Observer
    from ddp_notebook.rank.training.step_marks import StepMarks
    from ddp_notebook.rank.training.tracker import Tracker

Mark = tuple[int, int, int, int]
_OWN = {
    step_marks.LOADING: StepPart.DATA,
    step_marks.LOADED: StepPart.LOOP,
    step_marks.FORWARD: StepPart.FORWARD,
    step_marks.INNER: StepPart.FORWARD,
    step_marks.FORWARDED: StepPart.LOSS,
    step_marks.BACKWARD: StepPart.BACKWARD,
    step_marks.BUCKET: StepPart.BACKWARD,
    step_marks.REDUCED: StepPart.AFTER,
    step_marks.STEP: StepPart.OPTIMIZER,
    step_marks.STEPPED: StepPart.LOOP,
}
"""The part of the step that a mark of each kind begins."""
_WAITS = {(step_marks.BUCKET, step_marks.REDUCED), (step_marks.FORWARD, step_marks.INNER)}
"""Between two such marks DDP waits for the others: for gradients, or for rank 0's buffers."""
_LEFT_OUT = (step_marks.REDUCED, step_marks.REDUCED)
"""Between two such marks are steps that were not marked."""


@dataclass(eq=False)
class StepTimer:
    """Reports the newest steps of this rank on request."""

    marks: StepMarks
    tracker: Tracker
    observer: Observer
    rank: int

    def times(self) -> StepTimes:
        """The steps of the current or the last run. Any thread may ask at any time."""
        log = self.observer.log
        waited = log.waited() if log is not None else Waited()
        key = self._key(waited.groups)
        rows: list[TimedStep] = []
        if key and not waited.paused and not waited.to_peers and not self.tracker.broken:
            rows = steps(self.marks.marks(), waited.spans)[-300:]
        places = {
            _OWN[kind]: place
            for kind, place in list(self.marks.places.items())
            if place is not None and kind not in (step_marks.LOADED, step_marks.STEPPED)
        }
        # The cores that the main thread may use: affinity is each thread's own.
        known = hasattr(os, "sched_getaffinity")
        cores = sorted(os.sched_getaffinity(os.getpid())) if known else ()
        return StepTimes(
            self.rank,
            self.observer.run,
            socket.gethostname(),
            tuple(cores),
            key,
            tuple(rows),
            places,
        )

    def _key(self, groups: Sequence[str]) -> str:
        """Equal on ranks that train one model together; empty where times tell nothing.

        The host does not know when work on a GPU is done: its own times tell nothing.
        """
        stepped = [
            optimizer for optimizer in list(self.tracker.optimizers.values()) if optimizer.steps
        ]
        shapes = sorted(optimizer.made_of for optimizer in stepped)
        if not shapes or not groups or any(optimizer.on_device for optimizer in stepped):
            return ""
        return f"{' '.join(shapes)} {' '.join(sorted(groups))}"


def steps(marks: Sequence[Mark], spans: Sequence[tuple[int, int]]) -> list[TimedStep]:
    """The steps between these marks; `spans` are the collectives in which the thread waited.

    The first is left out: it may have begun before.
    """
    marks = _with_queue(marks)
    by_bucket = any(kind == step_marks.BUCKET for kind, *_ in marks)
    at_its_end = step_marks.REDUCED if by_bucket else step_marks.STEP
    rows: list[TimedStep] = []
    step, ends_ns = _Step(), [done_ns for _, done_ns in spans]
    for one, other in pairwise(marks):
        kind, number, begin_ns, queued_ns = one
        following, _, end_ns, queued_then_ns = other
        # Two kinds of steps: where buckets are handed over, a backward's end ends the step; where
        # the user averages by hand, the first optimizer step after a collective does.
        within = spans[bisect_right(ends_ns, begin_ns) : bisect_right(ends_ns, end_ns)]
        waited_ns = sum(done_ns - at_ns for at_ns, done_ns in within if at_ns >= begin_ns)
        if (kind, following) == _LEFT_OUT:
            step = _Step()
            continue
        if kind == step_marks.BACKWARD:
            step.number = number
        step.reduced |= kind == step_marks.BUCKET if by_bucket else waited_ns > 0
        if (kind, following) in _WAITS:
            waited_ns = end_ns - begin_ns
        step.add(_OWN[kind], end_ns - begin_ns, waited_ns, queued_then_ns - queued_ns)
        if following == at_its_end and step.reduced:
            rows.append(step.row())
            step = _Step()
    return rows[1:]


def _with_queue(marks: Sequence[Mark]) -> list[Mark]:
    """The marks with their time without a core, interpolated between two that were read."""
    known = [at for at, mark in enumerate(marks) if mark[3] != step_marks.UNKNOWN]
    filled = list(marks)
    for begin, end in pairwise(known):
        (*_, begin_ns, from_ns), (*_, end_ns, to_ns) = marks[begin], marks[end]
        rate = (to_ns - from_ns) / max(1, end_ns - begin_ns)
        for at in range(begin + 1, end):
            kind, number, at_ns, _ = marks[at]
            filled[at] = (kind, number, at_ns, from_ns + int((at_ns - begin_ns) * rate))
    return filled[known[0] : known[-1] + 1] if known else []


class _Step:
    """One training step while its parts are added up."""

    def __init__(self) -> None:
        self.number = 0
        self.reduced = False
        self.own_ns = dict.fromkeys(StepPart, 0.0)
        self.waited_ns = self.queued_ns = 0.0

    def add(self, part: StepPart, wall_ns: int, waited_ns: int, queued_ns: int) -> None:
        """Add time to a part. Time without a core is left out."""
        waiting = min(1.0, waited_ns / wall_ns) if wall_ns > 0 else 0.0
        queued_own_ns = queued_ns * (1 - waiting)
        self.waited_ns += waited_ns
        self.queued_ns += queued_own_ns
        self.own_ns[part] += max(0.0, wall_ns - waited_ns - queued_own_ns)

    def row(self) -> TimedStep:
        """The finished step as a row."""
        return TimedStep(
            self.number,
            int(self.waited_ns) // 1000,
            int(self.queued_ns) // 1000,
            tuple(int(self.own_ns[part]) // 1000 for part in StepPart),
        )
