"""The benchmark of collectives on this rank: its groups, facts and progress."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from IPython.core.getipython import get_ipython
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.bench.plan import Plan
from ddp_notebook.model import CellFinished, CellStarted, Progress, codec
from ddp_notebook.model.ddp import RankFailure
from ddp_notebook.rank.bench import floors, loop, memory
from ddp_notebook.rank.bench.host_load import Meter
from ddp_notebook.rank.calls import BenchDevice, BenchRequest
from ddp_notebook.rank.collectives.observer import Observer, unobserved
from ddp_notebook.rank.events import EventSender
from ddp_notebook.rank.training import ddp

PROGRESS_STEPS = 1000
"""A run's progress is reported in thousandths."""


class CollectivesBench:
    """Runs the benchmark of collectives when the session calls it."""

    def __init__(self, sender: EventSender, observer: Observer) -> None:
        self._sender = sender
        self._observer = observer

    def facts(self, request: BenchDevice) -> dict[str, Any]:
        """The facts needed before memory is allocated: this rank's host, and its free memory."""
        return {
            "host": socket.gethostname(),
            "free_bytes": memory.free_bytes(torch.device(request.device)),
            "backend": dist.get_backend_config(),
            "buckets_bytes": _buckets_bytes(),
            # A plain str: its own type would load torch in the notebook.
            "versions": {"torch": str(torch.__version__)},
        }

    def run(self, request: BenchRequest) -> dict[str, Any] | RankFailure:
        """Run the benchmark's loop on this rank; returns a failure if the backend cannot do it."""
        plan, members = codec.decode(Plan, request.plan), request.members
        sender = self._sender

        def report(done: float, visit: dict[str, Any]) -> None:
            thousandths = round(done * PROGRESS_STEPS)
            sender.emit(Progress, task="bench", done=thousandths, total=PROGRESS_STEPS, value=visit)

        outcome = "error"
        try:
            with self._observer.suspended(), _interrupts_noted() as stopped:
                sender.emit(CellStarted, cell=0)  # from here on an interrupt does no harm
                on_device = torch.device(request.device)
                with _groups(members, request.backend, plan.world_sizes) as (control, groups):
                    rank = control.rank()
                    started = Meter.read()
                    run = loop.Bench(plan, on_device, rank, control, groups, report, stopped)
                    visits = loop.measure(run)
                    spent = started.until(Meter.read())
                    measured = [] if stopped() else floors.measure(control, rank, on_device)
            outcome = "ok"
        except (RuntimeError, ValueError) as error:  # torch's words for what a backend cannot do
            return RankFailure("error", f"{type(error).__name__}: {error}")
        finally:
            sender.emit(CellFinished, cell=0, outcome=outcome)
        return {"visits": visits, "floors": measured, "host": socket.gethostname(), **spent}


def _buckets_bytes() -> list[int]:
    """The sizes of the buckets of the first DDP object among the user's variables."""
    shell = get_ipython()
    names: Mapping[str, Any] = shell.user_ns if shell is not None else {}
    for name, value in tuple(names.items()):
        if isinstance(value, DistributedDataParallel) and not name.startswith("_"):
            return [bucket.size_bytes for bucket in ddp.reduction(value).buckets or ()]
    return []


@contextlib.contextmanager
def _groups(
    members: Sequence[int], backend: str, world_sizes: Sequence[int]
) -> Iterator[tuple[Any, dict[int, Any]]]:
    """Torch's own groups, not observed: of all `members`, and by world size.

    None for a group that this rank is not in. Groups made for the benchmark are destroyed.
    """
    made = []

    def make(ranks: Sequence[int]) -> Any:
        # Only those that are in it call this: the others may be dead, or busy.
        group = dist.new_group(list(ranks), backend=backend or None, use_local_synchronization=True)
        made.append(group)
        return group

    whole = len(members) == dist.get_world_size()
    try:
        control = unobserved(dist.group.WORLD) if whole and not backend else make(members)
        groups = {len(members): control}
        for size in world_sizes:
            if size not in groups:
                inside = dist.get_rank() in members[:size]
                groups[size] = make(members[:size]) if inside else None
        yield control, groups
        dist.barrier(group=control)
    finally:
        for group in reversed(made):
            dist.destroy_process_group(group)


@contextlib.contextmanager
def _interrupts_noted() -> Iterator[Callable[[], bool]]:
    """Within, an interrupt is only noted: a rank that left a collective would block the others."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    previous = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGINT, previous)
