"""The benchmark of training steps on this rank: prepared first, then run.

Everything is done to a copy. What the user has (parameters, gradients, buffers, mode, random
numbers) is as it was afterwards, whatever comes in between.
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
from ddp_notebook.rank import events, torch_private
from ddp_notebook.rank.bench import memory, steps_data, steps_loop, steps_models
from ddp_notebook.rank.collectives import observer
from ddp_notebook.rank.training import ddp
from ddp_notebook.rank.training import hooks as training
from ddp_notebook.rank.training.ddp_stage import is_out_of_memory

TASK = "steps"
_COPIES = 4
"""Of the parameters: the copy, its gradients, DDP's buckets, and what reduces them alone."""


@dataclass(slots=True)
class _Ready:
    """A model that is prepared, until it is measured or forgotten."""

    plan: StepPlan
    subject: steps_models.Subject
    feed: steps_data.Feed


@dataclass(slots=True)
class _Task:
    """What is prepared on this rank, from `prepare` to `measure` or `forget`."""

    ready: _Ready | None = None


_task = _Task()


def prepare(plan: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Copy or make the model, feed it, and find out what it needs. Without communication.

    Gives what it is (``title``, ``parameters``, ``gradient_bytes``, ``inputs``, ``contents`` as
    a `Fingerprint`), ``memory`` as `bench.steps.plan.Memory` has it,
    the batches that ``work``, and what was ``raised`` with the next one. ``communicates`` is
    True for a model whose own forward or backward calls collectives.
    """
    forget()
    return _answer(lambda _: _prepare(plan, device))


def measure(batches: list[int], alone: bool) -> dict[str, Any]:
    """Measure what was prepared, with these of its batches. All ranks must call it.

    With `alone` rank 0 by itself too. Sends each block as a Progress event, and gives
    ``{"finished": bool, "blocks": how many}``.
    """

    def work(stopped: Callable[[], bool]) -> dict[str, Any]:
        with observer.observer.paused():
            return _measure(batches, alone, stopped)

    return _answer(work)


def forget() -> dict[str, Any]:
    """Let go of what was prepared."""
    _task.ready = None
    return {}


def _prepare(plan: Mapping[str, Any], device: str) -> dict[str, Any]:
    names = get_ipython().user_ns
    planned = codec.decode(StepPlan, plan)
    value = names.get(planned.model)
    ranks = dist.get_world_size()
    if isinstance(value, torch.nn.Module):
        copies = _COPIES * memory.model_bytes(value)
        free = memory.allowed_bytes(torch.device(device), ranks)
        if copies > free:
            text = f"to train a copy of it takes {format_bytes(copies)}"
            return {"failed": "memory", "text": f"{text}, and {format_bytes(free)} are free"}
    subject = steps_models.prepare(planned.model, names, device)
    feed = steps_data.feed(subject, planned.loss, planned.data, names)
    before = _collectives()
    needs = memory.memory(subject, feed, ranks, min(planned.batches))
    fits = [batch for batch in planned.batches if needs.needs(batch) <= needs.available_bytes]
    works, raised = steps_loop.try_batches(subject, feed, fits)
    _task.ready = _Ready(planned, subject, feed)
    return {
        "communicates": _collectives() > before,
        "title": subject.title,
        "parameters": subject.parameters(),
        "gradient_bytes": subject.gradient_bytes(),
        "inputs": feed.text,
        "contents": codec.encode(ddp.contents(subject.module)),
        "memory": [needs.available_bytes, needs.fixed_bytes, needs.sample_bytes],
        "works": works,
        "raised": raised,
        "notes": _notes(value, planned.model),
        "threads": torch.get_num_threads(),
        "backend": str(dist.get_backend()),
        "device": subject.device.type,
    }


def _collectives() -> int:
    """How many this rank has issued in its run, as far as they are observed."""
    ring = observer.observer.ring
    return ring.written if ring is not None else 0


def _notes(value: Any, name: str) -> list[str]:
    hooks = torch_private.hook_names(value)
    if not hooks:
        return []
    return [f"{name} has a communication hook, {', '.join(hooks)}: it was measured without it."]


def _measure(batches: list[int], alone: bool, stopped: Callable[[], bool]) -> dict[str, Any]:
    ready, _task.ready = _task.ready, None
    if ready is None:
        return {"failed": "error", "text": "nothing was prepared"}
    plan = replace(ready.plan, batches=tuple(batches))
    sender = events.current()

    def report(done: int, total: int, value: Mapping[str, Any]) -> None:
        sender.emit(Progress, task=TASK, done=done, total=total, value=dict(value))

    try:
        return steps_loop.measure(plan, ready.subject, ready.feed, report, stopped, alone=alone)
    finally:
        sender.flush()


# -- around it -------------------------------------------------------------------------


def _answer(work: Callable[[Callable[[], bool]], dict[str, Any]]) -> dict[str, Any]:
    """What `work` gives; what it raises is an answer too, or the session would not learn of it.

    An interrupt is noted and not raised: ranks that stop at different places would wait for
    each other. `work` gets what tells whether there was one.
    """
    with _busy() as stopped:
        try:
            with training.paused(), _random_kept(), torch.enable_grad():
                return work(stopped)
        except Exception as error:  # noqa: BLE001  # the user's model may raise anything
            kind = "memory" if is_out_of_memory(error.__cause__ or error) else "error"
            known = isinstance(error, steps_models.Unusable)
            return {"failed": kind, "text": str(error) if known else steps_models.on_a_line(error)}


@contextlib.contextmanager
def _busy() -> Iterator[Callable[[], bool]]:
    """Meanwhile the board shows what the rank does; the value tells of an interrupt."""
    received: list[int] = []
    sender = events.current()
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


@contextlib.contextmanager
def _random_kept() -> Iterator[None]:
    """The random numbers that the user gets afterwards are those that would have come."""
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
