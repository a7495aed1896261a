"""The benchmark of collectives on this rank: visits sizes, times each one, checks its result.

Every rank runs the same collectives in the same order. What depends on the clock (how long to
warm up, what to measure next, how often, when to stop) is decided by rank 0 and broadcast, or
the ranks would diverge.

The protocol is that of the MPI benchmarks:
S. Hunold and A. Carpen-Amarie, "Reproducible MPI Benchmarking is Still Not as Easy as You
Think", IEEE TPDS 27, 2016 (synchronised starts, the slowest rank, several shuffled runs), and
T. Hoefler and R. Belli, "Scientific Benchmarking of Parallel Computing Systems", SC 2015
(medians with intervals by rank, measure until they are narrow).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from IPython.core.getipython import get_ipython

from ddp_notebook.bench.plan import IN_FLIGHT, CurvePlan, Item, Plan, Schedule
from ddp_notebook.model import Progress, codec
from ddp_notebook.model.ddp import RankFailure
from ddp_notebook.rank.bench import machine
from ddp_notebook.rank.bench.operations import Buffers, Call, Operation
from ddp_notebook.rank.calls import BenchDevice, BenchRequest
from ddp_notebook.rank.collectives.observer import Observer, unobserved
from ddp_notebook.rank.events import EventSender
from ddp_notebook.rank.torch_private import groups_counted_from
from ddp_notebook.rank.training import ddp

_STOP = -1
_KEEP_WARMING_UP = 0

Visit = dict[str, Any]
Report = Callable[[float, Visit], None]


class CollectivesBench:
    """Runs the benchmark of collectives when the session calls it."""

    def __init__(self, sender: EventSender, observer: Observer) -> None:
        self._sender = sender
        self._observer = observer

    def facts(self, request: BenchDevice) -> dict[str, Any]:
        """The facts needed before memory is allocated: this rank's host, and its free memory."""
        return {
            "host": socket.gethostname(),
            "free_bytes": machine.free_bytes(torch.device(request.device)),
            "backend": dist.get_backend_config(),
            "bucket_bytes": ddp.bucket_bytes([*get_ipython().user_ns.values()]),
            # A plain str: its own type would load torch in the notebook.
            "versions": {"torch": str(torch.__version__)},
        }

    def run(self, request: BenchRequest) -> dict[str, Any] | RankFailure:
        """Run the benchmark's loop on this rank; returns a failure if the backend cannot do it."""
        plan, members = codec.decode(Plan, request.plan), request.members
        device, sender = torch.device(request.device), self._sender

        def report(done: float, visit: Visit) -> None:
            thousandths = round(done * 1000)
            sender.emit(Progress, task="bench", done=thousandths, total=1000, value=visit)

        try:
            with (
                self._observer.suspended(),
                interrupts_noted() as stopped,
                sender.at_work(""),  # from here on an interrupt does no harm
                groups_of(members, request.number, request.backend, plan.world_sizes) as (
                    control,
                    groups,
                ),
            ):
                started = machine.Meter.read()
                run = Bench(plan, device, control.rank(), control, groups, report, stopped)
                visits = measure(run)
                copies = copy_gb_per_s(run)
                spent = started.until(machine.Meter.read())
        except (RuntimeError, ValueError) as error:  # torch's words for what a backend cannot do
            return RankFailure("error", f"{type(error).__name__}: {error}")
        return {"visits": visits, "copy_gb_per_s": copies, **spent}


@contextlib.contextmanager
def interrupts_noted() -> Iterator[Callable[[], bool]]:
    """Within, an interrupt is only noted: a rank that left a collective would block the others."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    # Python runs handlers between two bytecodes of the main thread, so not while it is inside a
    # collective: the interrupt is noted when that is over, and rank 0 ends the run for all.
    previous = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def groups_of(
    members: Sequence[int], number: int, backend: str = "", world_sizes: Sequence[int] = ()
) -> Iterator[tuple[Any, dict[int, Any]]]:
    """Torch's own groups, not observed: of all `members`, and by world size.

    None for a group that this rank is not in. Groups made for the benchmark are destroyed.
    """
    made: list[Any] = []

    def make(ranks: Sequence[int]) -> Any:
        # Only those that are in it call this: the others may be dead, or busy.
        with groups_counted_from(number + len(made)):
            group = dist.new_group(
                list(ranks), backend=backend or None, use_local_synchronization=True
            )
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
        # No rank destroys a group while another is still in its last collective there. After an
        # error this is left out: the others may never come.
        dist.barrier(group=control)
    finally:
        for group in reversed(made):
            dist.destroy_process_group(group)


# -- the loop ----------------------------------------------------------------------------


@dataclass
class Bench:
    """One run on one rank.

    `groups` are by world size, of the first so many ranks, None where this rank is not in it;
    `control` is of all ranks that take part. `device` is where the tensors live.
    """

    plan: Plan
    device: torch.device
    rank: int
    control: Any
    groups: Mapping[int, Any]
    report: Report
    stopped: Callable[[], bool]
    """Tells rank 0 whether to stop."""
    started_s: float = field(default_factory=time.monotonic)

    @property
    def spent_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.started_s

    def agree(self, decision: int, group: Any) -> int:
        """Return what rank 0 decided."""
        # On the device that is measured: NCCL broadcasts no tensors of a CPU.
        shared = torch.tensor([decision], dtype=torch.int64, device=self.device)
        dist.broadcast(shared, group=group, group_src=0)
        return int(shared.item())


def measure(bench: Bench) -> list[Visit]:
    """Runs the plan on this rank; all ranks of `bench.control` must call it.

    After each visit to one size `bench.report(share done, visit)` is called. Returns all
    visits: ``number`` counts them, the same on all ranks, ``curve`` is the number of the curve,
    ``size_bytes`` the size, ``times_ns`` the time of every iteration (iteration i is the same
    collective on all ranks), ``issue_ns`` how long this rank took to issue its part, ``wrong``
    how many elements were wrong.
    """
    plan = bench.plan
    curves = plan.curves(bench.control.size())
    buffers = _buffers(plan, curves, bench.device)
    items = [
        Item(number, size)
        for number, curve in enumerate(curves)
        for size in curve.sizes(plan.sizes())
    ]
    schedule, visits = Schedule(plan, items), []
    for number in itertools.count():
        decision = _STOP
        if bench.rank == 0 and not bench.stopped():
            wanted = schedule.next(bench.spent_s)
            decision = items.index(wanted) if wanted is not None else _STOP
        decision = bench.agree(decision, bench.control)
        if decision == _STOP:
            break
        item, latest = items[decision], {}
        curve = curves[item.curve]
        group = bench.groups[curve.world_size]
        if group is None:  # this rank is not in it; its schedule still knows what was visited
            schedule.times_ns[item].append([1])
        else:
            operation = Operation(curve, item.size_bytes, buffers, group, bench.rank)
            latest = {"number": number, **_visit(bench, schedule, item, operation, group)}
            visits.append(latest)
        bench.report(schedule.progress(bench.spent_s), latest)
    return visits


def copy_gb_per_s(bench: Bench) -> float:
    """Return how fast this rank copies its memory while all ranks of its host do.

    What arrives at a rank must at least be written once, so no collective is faster.
    """
    source = torch.zeros(min(bench.plan.max_bytes, 2**26), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    copy = functools.partial(target.copy_, source)
    time_each([copy], 1, bench.device)  # touches the memory for the first time
    wait_for_all(bench.control, bench.device)
    return source.numel() / max(statistics.median(time_each([copy], 5, bench.device)), 1)


def _buffers(plan: Plan, curves: Sequence[CurvePlan], device: torch.device) -> Buffers:
    """Take memory once, for the largest size of any curve."""
    # What is freed and taken again would be touched for the first time within a timed region.
    largest = {curve: max(curve.sizes(plan.sizes()), default=0) for curve in curves}
    for curve in curves:
        largest[curve] *= IN_FLIGHT if curve.mode == "pipelined" else 1
    received = (size for curve, size in largest.items() if not curve.operation.in_place)
    return Buffers(max(1, *largest.values()), max(received, default=1) or 1, device)


def _visit(bench: Bench, schedule: Schedule, item: Item, operation: Operation, group: Any) -> Visit:
    """Warm up, and measure one size once.

    `schedule` is the same on all ranks, though rank 0 alone asks it.
    """
    # The result of one collective on known values is compared exactly. Timed are zeros: in-place
    # sums of anything else would grow until they overflow. That they stay zeros is checked in every
    # round, which costs a pass over the memory; the values in the first three, which costs several.
    wrong = operation.check() if len(schedule.times_ns[item]) < 3 else 0
    # The first collectives of a size are slow for reasons that a training meets once: connections
    # are opened, buffers registered, memory touched for the first time. How many there are depends
    # on the backend, so it is looked at until the slowest of some is near the fastest. A size that
    # was measured before needs only one short warm-up.
    plan, new = bench.plan, not schedule.times_ns[item]
    warmup_ns: list[int] = []
    iterations = _KEEP_WARMING_UP
    while iterations == _KEEP_WARMING_UP:
        warmup_ns += time_each(operation.calls, plan.warmup if new else 1, bench.device)
        decision = schedule.iterations(item, warmup_ns[-plan.warmup :])
        if new and bench.spent_s < plan.budget_s and not plan.has_settled(warmup_ns):
            decision = _KEEP_WARMING_UP
        iterations = bench.agree(decision, group)
    wait_for_all(group, bench.device)
    times_ns = time_each(operation.calls, iterations, bench.device)
    # An iteration takes as long as on its slowest rank: a rank that comes late is waited for by the
    # others, whose times have the delay as well, and its own are too short. All ranks need these
    # times, since each keeps a schedule, though rank 0 alone decides by it.
    times = torch.tensor(times_ns, dtype=torch.int64, device=bench.device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    slowest_ns = [int(t) for t in times.tolist()]
    # How long this rank takes to issue its part. A collective ends at the same time on every rank,
    # whichever is late: while the late rank has not begun, the others already wait.
    issue_ns = []
    for _ in range(1 if min(slowest_ns) > 10_000_000 else 3):
        started_ns = time.perf_counter_ns()
        work = operation.calls[0](async_op=True)
        issue_ns.append(time.perf_counter_ns() - started_ns)
        work.wait()
    wrong += operation.left()
    schedule.times_ns[item].append(slowest_ns)
    return {
        "curve": item.curve,
        "size_bytes": item.size_bytes,
        "times_ns": times_ns,
        "issue_ns": issue_ns,
        "wrong": wrong,
    }


def wait_for_all(group: Any, device: torch.device) -> None:
    """Returns when every rank of the group has called it and the device is idle."""
    if device.type == "cuda":
        # ProcessGroupNCCL implements its barrier so; `dist.barrier` would have to guess the device.
        dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=device), group=group)
        torch.cuda.synchronize(device)
    else:
        dist.barrier(group=group)


# -- the timed region --------------------------------------------------------------------


def time_each(calls: Sequence[Call], iterations: int, device: torch.device) -> list[int]:
    """Return the time of each of `iterations` collectives, in nanoseconds.

    With one call, each is waited for before the next. With several, they are in flight at the same
    time, and an iteration is the time of all of them divided by their number.
    """
    clock = clock_of(device)
    stamps: list[Any] = [clock()]
    if len(calls) == 1:
        call = calls[0]
        for _ in range(iterations):
            call()
            stamps.append(clock())
    else:
        for _ in range(iterations):
            for work in [call(async_op=True) for call in calls]:
                work.wait()
            stamps.append(clock())
    return [span_ns // len(calls) for span_ns in spans_ns(stamps)]


def clock_of(device: torch.device) -> Callable[[], Any]:
    """Return what stamps the present moment of a device; `spans_ns` has the times between stamps.

    On a GPU a stamp is an event in its stream, recorded when the work before it is done: the host
    runs ahead of it, so its clock would tell how long it takes to queue the work.
    """
    if device.type != "cuda":
        return time.perf_counter_ns

    def stamp() -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    return stamp


def since_ns(start: Any, stamps: Iterable[Any]) -> list[int]:
    """Return the nanoseconds from `start` to each of the stamps, once a GPU has made them."""
    if isinstance(start, int):
        return [stamp - start for stamp in stamps]
    times = []
    for stamp in stamps:
        stamp.synchronize()
        times.append(round(start.elapsed_time(stamp) * 1e6))
    return times


def spans_ns(stamps: Sequence[Any]) -> list[int]:
    """Return the nanoseconds between the stamps of one clock, once a GPU has made them all."""
    pairs = itertools.pairwise(stamps)
    if isinstance(stamps[0], int):
        return [end - start for start, end in pairs]
    stamps[-1].synchronize()
    return [round(start.elapsed_time(end) * 1e6) for start, end in pairs]
