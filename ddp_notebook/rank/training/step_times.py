"""What this rank's newest training steps were made of: its own parts, and where it waited.

A step ends where the rank has reduced its gradients with the others: at the end of a backward
that handed over buckets or, where no backward does, at an optimizer's step after a collective.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from ddp_notebook.model import StepPart, StepRow, StepTimes
from ddp_notebook.model.collective_log import Waited
from ddp_notebook.rank.collectives.observer import Observer
from ddp_notebook.rank.training import step_marks
from ddp_notebook.rank.training.replicas import Tracker
from ddp_notebook.rank.training.step_marks import StepMarks

Mark = tuple[int, int, int, int]
_MOST_ROWS = 300
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
"""In which part of the step a rank is after a mark of that kind."""
_WAITS = {
    (step_marks.BUCKET, step_marks.REDUCED),
    (step_marks.FORWARD, step_marks.INNER),
}
"""Between two such marks DDP waits for the others: for gradients, or for rank 0's buffers."""


class StepTimer:
    """Tells the newest steps of this rank, when somebody asks."""

    def __init__(self, marks: StepMarks, tracker: Tracker, observer: Observer, rank: int) -> None:
        self._marks = marks
        self._tracker = tracker
        self._observer = observer
        self._rank = rank

    def times(self) -> StepTimes:
        """Of the run that is under way, or was the last. Safe whatever the main thread does."""
        log = self._observer.log
        waited = log.waited() if log is not None else Waited()
        key = self._key(waited.groups)
        rows: list[StepRow] = []
        if key and not waited.paused and not waited.to_peers and not self._tracker.broken:
            rows = steps(self._marks.marks(), waited.spans)[-_MOST_ROWS:]
        places = {
            _OWN[kind]: place
            for kind, place in list(self._marks.places.items())
            if place is not None and kind not in (step_marks.LOADED, step_marks.STEPPED)
        }
        return StepTimes(
            self._rank,
            self._observer.run,
            socket.gethostname(),
            tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else (),
            key,
            tuple(rows),
            places,
        )

    def _key(self, groups: Sequence[str]) -> str:
        """Equal on ranks that train one model together; empty where times tell nothing.

        Work on a GPU is done when nobody knows: what the host did meanwhile tells nothing.
        """
        stepped = [each for each in list(self._tracker.optimizers.values()) if each.steps]
        shapes = sorted(each.made_of for each in stepped)
        if not shapes or not groups or any(each.on_device for each in stepped):
            return ""
        return f"{' '.join(shapes)} {' '.join(sorted(groups))}"


def steps(marks: Sequence[Mark], spans: Sequence[tuple[int, int]]) -> list[StepRow]:
    """The steps between these marks; `spans` are the collectives in which the thread waited.

    The first is left out: it may have begun before.
    """
    by_bucket = any(kind == step_marks.BUCKET for kind, *_ in marks)
    rows: list[StepRow] = []
    step, spans_at = _Step(), 0
    for (kind, number, begin_ns, queued_ns), (following, _, end_ns, queued_then_ns) in zip(
        marks, marks[1:], strict=False
    ):
        if kind == step_marks.BACKWARD:
            step.number = number
        if kind == step_marks.BUCKET:
            step.arrived_ns = begin_ns
        waited_ns = 0
        while spans_at < len(spans) and spans[spans_at][1] <= end_ns:
            issued_ns, done_ns = spans[spans_at]
            spans_at += 1
            if issued_ns >= begin_ns:
                waited_ns += done_ns - issued_ns
                if not by_bucket:
                    step.arrived_ns = issued_ns
        waits = (kind, following) in _WAITS
        step.add(
            _OWN[kind],
            end_ns - begin_ns,
            end_ns - begin_ns if waits else waited_ns,
            queued_then_ns - queued_ns,
        )
        at_its_end = step_marks.REDUCED if by_bucket else step_marks.STEP
        if following == at_its_end and step.arrived_ns:
            rows.append(step.row(end_ns))
            step = _Step()
    return rows[1:]


class _Step:
    """One step, as it is put together."""

    def __init__(self) -> None:
        self.number = 0
        self.arrived_ns = 0
        self.own_ns = dict.fromkeys(StepPart, 0.0)
        self.waited_ns = self.queued_ns = self.queued_waiting_ns = 0.0

    def add(self, part: StepPart, wall_ns: int, waited_ns: int, queued_ns: int) -> None:
        """A piece of a part. What it was without a core counts for neither."""
        waiting = min(1.0, waited_ns / wall_ns) if wall_ns > 0 else 0.0
        queued_waiting_ns = queued_ns * waiting
        queued_own_ns = queued_ns - queued_waiting_ns
        self.waited_ns += waited_ns
        self.queued_ns += queued_own_ns
        self.queued_waiting_ns += queued_waiting_ns
        self.own_ns[part] += max(0.0, wall_ns - waited_ns - queued_own_ns)

    def row(self, end_ns: int) -> StepRow:
        """It is over."""
        return StepRow(
            self.number,
            self.arrived_ns // 1000,
            end_ns // 1000,
            int(self.waited_ns) // 1000,
            int(self.queued_ns) // 1000,
            int(self.queued_waiting_ns) // 1000,
            tuple(int(self.own_ns[part]) // 1000 for part in StepPart),
        )
