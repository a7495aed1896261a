"""The benchmark of training steps on this rank: prepared first, then run.

Everything is done to a copy. The user's parameters, gradients, buffers, mode and random state are
unchanged afterwards, whatever happens.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from IPython.core.getipython import get_ipython

from ddp_notebook.bench.steps.plan import StepPlan
from ddp_notebook.model import CellFinished, CellStarted, Progress, codec, format_bytes
from ddp_notebook.model.ddp import RankFailure
from ddp_notebook.rank import torch_private
from ddp_notebook.rank.bench import memory, steps_data, steps_loop, steps_models
from ddp_notebook.rank.calls import Nothing, StepsMeasurement, StepsRequest
from ddp_notebook.rank.collectives.observer import Observer
from ddp_notebook.rank.events import EventSender
from ddp_notebook.rank.training import ddp
from ddp_notebook.rank.training.hooks import TrainingHooks

TASK = "steps"
_COPIES = 4
"""Copies of the parameters: the model, its gradients, DDP's buckets, the separate all_reduces."""


@dataclass(slots=True)
class _Ready:
    """A model that is prepared and not yet measured or released."""

    plan: StepPlan
    subject: steps_models.Subject
    feed: steps_data.Feed


class StepsBench:
    """Runs the benchmark of training steps when the session calls it."""

    def __init__(self, sender: EventSender, observer: Observer, hooks: TrainingHooks) -> None:
        self._sender = sender
        self._observer = observer
        self._hooks = hooks
        self._ready: _Ready | None = None

    def prepare(self, request: StepsRequest) -> dict[str, Any] | RankFailure:
        """Copy or make the model, try it, and measure its memory. Without communication.

        Returns a description (``title``, ``parameters``, ``gradient_bytes``, ``inputs``,
        ``contents`` as a `Fingerprint`), ``memory`` as in `bench.steps.plan.Memory`, the batches
        that ``work``, and the error ``raised`` by the next. ``communicates`` is True for a model
        whose own forward or backward calls collectives.
        """
        self._ready = None
        return self._answer(lambda _: self._prepare(request))

    def measure(self, request: StepsMeasurement) -> dict[str, Any] | RankFailure:
        """Measure the prepared model with these batches. All ranks must call it.

        Sends each block as a Progress event; returns ``{"finished": bool, "blocks": how many}``.
        """

        def work(stopped: Callable[[], bool]) -> dict[str, Any] | RankFailure:
            with self._observer.suspended():
                return self._measure(request, stopped)

        return self._answer(work)

    def forget(self, _: Nothing) -> None:
        """Release the prepared model."""
        self._ready = None

    def _prepare(self, request: StepsRequest) -> dict[str, Any] | RankFailure:
        names, device = get_ipython().user_ns, request.device
        plan = codec.decode(StepPlan, request.plan)
        value = names.get(plan.model)
        ranks = dist.get_world_size()
        if isinstance(value, torch.nn.Module):
            copies = _COPIES * memory.model_bytes(value)
            free = memory.allowed_bytes(torch.device(device), ranks)
            if copies > free:
                text = f"to train a copy of it takes {format_bytes(copies)}"
                return RankFailure("memory", f"{text}, and {format_bytes(free)} are free")
        subject = steps_models.prepare(plan.model, names, device)
        feed = steps_data.feed(subject, plan.loss, plan.data, names)
        before = self._collectives()
        needs = memory.memory(subject, feed, ranks, min(plan.batches))
        fits = [batch for batch in plan.batches if needs.needs(batch) <= needs.available_bytes]
        works, raised = steps_loop.try_batches(subject, feed, fits)
        self._ready = _Ready(plan, subject, feed)
        return {
            "communicates": self._collectives() > before,
            "title": subject.title,
            "parameters": subject.parameters(),
            "gradient_bytes": subject.gradient_bytes(),
            "inputs": feed.text,
            "contents": ddp.contents(subject.module),
            "memory": [needs.available_bytes, needs.fixed_bytes, needs.sample_bytes],
            "works": works,
            "raised": raised,
            "notes": _notes(value, plan.model),
            "threads": torch.get_num_threads(),
            "backend": str(dist.get_backend()),
            "device": subject.device.type,
        }

    def _collectives(self) -> int:
        """The number of observed collectives that this rank has issued in its run."""
        log = self._observer.log
        return log.written if log is not None else 0

    def _measure(
        self, request: StepsMeasurement, stopped: Callable[[], bool]
    ) -> dict[str, Any] | RankFailure:
        ready, self._ready = self._ready, None
        if ready is None:
            return RankFailure("error", "nothing was prepared")
        plan = replace(ready.plan, batches=request.batches)
        sender, alone = self._sender, request.alone

        def report(done: int, total: int, value: Mapping[str, Any]) -> None:
            sender.emit(Progress, task=TASK, done=done, total=total, value=dict(value))

        try:
            return steps_loop.measure(plan, ready.subject, ready.feed, report, stopped, alone=alone)
        finally:
            sender.flush()

    # -- around it -----------------------------------------------------------------------

    def _answer(
        self, work: Callable[[Callable[[], bool]], dict[str, Any] | RankFailure]
    ) -> dict[str, Any] | RankFailure:
        """The result of `work`, or its exception as a failure: the session waits for an answer.

        An interrupt is only noted: ranks that stopped at different points would wait for each
        other. `work` gets a function that tells whether there was one.
        """
        with self._busy() as stopped:
            try:
                with self._hooks.suspended(), _random_kept(), torch.enable_grad():
                    return work(stopped)
            except Exception as error:  # noqa: BLE001  # the user's model may raise anything
                kind = "memory" if ddp.is_out_of_memory(error.__cause__ or error) else "error"
                known = isinstance(error, steps_models.Unusable)
                return RankFailure(kind, str(error) if known else steps_models.on_a_line(error))

    @contextlib.contextmanager
    def _busy(self) -> Iterator[Callable[[], bool]]:
        """Within, the board shows what the rank does; the value tells of an interrupt."""
        received: list[int] = []
        sender = self._sender
        pulse = sender.pulse
        previous = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
        sender.pulse = lambda: {**pulse(), "doing": "%ddp_bench: training steps"}
        sender.emit_now(CellStarted, cell=0)
        try:
            yield lambda: bool(received)
        finally:
            sender.pulse = pulse
            sender.emit_now(CellFinished, cell=0, outcome="ok")
            signal.signal(signal.SIGINT, previous)


def _notes(value: Any, name: str) -> list[str]:
    hooks = torch_private.hook_names(value)
    if not hooks:
        return []
    return [f"{name} has a communication hook, {', '.join(hooks)}: it was measured without it."]


@contextlib.contextmanager
def _random_kept() -> Iterator[None]:
    """Within, random numbers may be drawn; the random state is restored afterwards."""
    numpy: Any = sys.modules.get("numpy")
    before = random.getstate(), numpy.random.get_state() if numpy is not None else None
    devices = [torch.cuda.current_device()] if torch_private.uses_cuda() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(before[0])
        if before[1] is not None:
            numpy.random.set_state(before[1])
