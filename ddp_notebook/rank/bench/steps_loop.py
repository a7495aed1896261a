"""Times training steps with and without communication, block by block.

Method. A step is forward, loss, backward, the optimizer's step (SGD with a learning rate of 0: it
costs the same, and the values do not change) and `zero_grad`. Between its parts there are only
clock reads. The cost of communication is the time of a DDP step minus that of the same step under
`no_sync`, in turns within each block and over several rounds: neither hooks nor DDP's own logger
can see that communication slows down the computation. DDP's first steps are not timed: the first
backward has a single bucket, and the buckets are rebuilt when the second begins. Nor is the first
step after a change between the two kinds, because DDP broadcasts buffers in the forward after a
step of either kind that was reduced.

Sources: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
PVLDB 13 (12), 2020: figure 2 (total time against parameters per all_reduce), figure 6 (where a
step's time goes), figures 7 and 8 (bucket sizes). DDP's notes,
https://pytorch.org/docs/stable/notes/ddp.html, for buckets and `no_sync`.

Every rank runs the same steps in the same order. Decisions that depend on a clock, or on an event
on one rank (an interrupt, an error), are made by a collective before each block.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.bench.steps.plan import Block, StepPlan, reduce_sizes, reduces_at_once
from ddp_notebook.rank import torch_private
from ddp_notebook.rank.bench.host_load import RunQueue
from ddp_notebook.rank.bench.steps_data import Feed
from ddp_notebook.rank.bench.steps_hooks import Clock, Stamps, reduce_as_ddp_does
from ddp_notebook.rank.bench.steps_models import Subject, Unusable, users_code

_WARM_UP = 3
"""Steps until the buckets of a DDP object do not change any more."""
_LEAST_STAMPED = 8
"""Steps with timestamps in a block: with fewer no rank can be identified as late."""
_PARTS = 4
"""Timestamps of a step: before the forward, the backward, the optimizer, and after it."""
_STOPPED = -1
_AT_BATCH = "{{}} (batch {})"
"""The error that the model raised, and the number of samples."""

Record = dict[str, Any]
"""One rank's measurements in one block, as JSON; see `bench.steps.stats`."""


@dataclass(slots=True, eq=False)
class _Run:
    """One run on one rank."""

    plan: StepPlan
    subject: Subject
    feed: Feed
    stopped: Callable[[], bool]
    deadline_ns: int
    rank: int
    ranks: int
    queue: RunQueue
    clock: Clock
    optimizer: torch.optim.Optimizer
    wrapped: DistributedDataParallel | None = None
    stamps: Stamps | None = None
    wrapped_for: tuple[str, str, int] | None = None
    left: int = 0
    """The number of blocks left, this one included."""
    batches: dict[int, Any] = field(default_factory=dict)


def measure(
    plan: StepPlan,
    subject: Subject,
    feed: Feed,
    report: Callable[[int, int, Record], None],
    stopped: Callable[[], bool],
    *,
    alone: bool = True,
) -> Record:
    """Time the steps of `subject` on this rank; all ranks must call it.

    `report(done, total, record)` is called after each block. Once `stopped` is True on one rank,
    all ranks stop before the next block. Without `alone`, rank 0 takes no steps by itself: a model
    that communicates in its own forward cannot. Raises Unusable if the model raises; the other
    ranks then wait for this one. When the budget is spent, the round is finished and no other
    begins. Returns ``{"finished": bool, "blocks": how many}``.
    """
    queue = RunQueue()
    run = _Run(
        plan=plan,
        subject=subject,
        feed=feed,
        stopped=stopped,
        deadline_ns=time.perf_counter_ns() + int(plan.budget_s * 1e9),
        rank=dist.get_rank(),
        ranks=dist.get_world_size(),
        queue=queue,
        clock=Clock(subject.device, queue),
        optimizer=torch.optim.SGD(subject.module.parameters(), lr=0.0),
    )
    sizes = reduce_sizes(subject.gradient_bytes()) if run.ranks > 1 else ()
    schedule = [
        block
        for block in plan.schedule(plan.batches, sizes, run.ranks)
        if alone or block.kind != "alone"
    ]
    with _little_garbage(), contextlib.closing(queue):
        try:
            for done, block in enumerate(schedule):
                if done and block.round != schedule[done - 1].round and _is_spent(run):
                    return {"finished": True, "blocks": done}
                run.left = len(schedule) - done
                record = _KINDS[block.kind](run, block)
                if record is None:
                    return {"finished": False, "blocks": done}
                about = {"block": block.number, "kind": block.kind, "round": block.round}
                report(done + 1, len(schedule), {**about, **record})
        finally:
            _unwrap(run)
    return {"finished": True, "blocks": len(schedule)}


@contextlib.contextmanager
def _little_garbage() -> Iterator[None]:
    """Within, garbage collection ignores the objects that exist now: a full one takes 0.1 s."""
    if gc.get_freeze_count():  # the user has done so
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# -- the kinds of block ----------------------------------------------------------------


def _plain(run: _Run, block: Block) -> Record | None:
    """DDP steps, and the same under no_sync, in the order A B B A.

    Which kind is A changes from round to round.
    """
    wrapped = _wrap(run, block)
    batch = _batch(run, block.batch)
    estimate_ns = _untimed(run, wrapped, batch, block.batch)
    count = _agree(run, estimate_ns, kinds=2)
    if count == _STOPPED:
        return None
    times: dict[str, list[list[int]]] = {"sync": [], "local": []}
    one, other = ("sync", "local") if block.round % 2 == 0 else ("local", "sync")
    for kind in (one, other, other, one):
        with wrapped.no_sync() if kind == "local" else contextlib.nullcontext():
            _untimed(run, wrapped, batch, block.batch)
            _wait_for_all(run)
            times[kind] += _timed(run, wrapped, batch, block.batch, -(-count // 2))
    return {"batch": block.batch, "bucket": block.bucket, **times}


def _hooked(run: _Run, block: Block) -> Record | None:
    """DDP steps with timestamps of buckets, and the measurements of DDP's logger for each."""
    wrapped = _wrap(run, block)
    assert run.stamps is not None
    batch = _batch(run, block.batch)
    count = _agree(run, _untimed(run, wrapped, batch, block.batch))
    if count == _STOPPED:
        return None
    count = max(count, _LEAST_STAMPED)
    _wait_for_all(run)
    times, begins, waited, buckets, logged = [], [], [], [], []
    sizes: list[int] = []
    run.stamps.take()
    for _ in range(count):
        before_ns, queued_ns = time.perf_counter_ns(), run.queue.waited_ns()
        (parts,) = _timed(run, wrapped, batch, block.batch, 1)
        times.append(parts)
        begins.append(before_ns + parts[0])
        waited.append(run.clock.waited_ns[0][0])
        taken = run.stamps.take()
        sizes = [bucket[4] for bucket in taken]
        buckets.append([[*bucket[:3], bucket[3] - queued_ns] for bucket in taken])
        logged.append(torch_private.logged_step_ns(wrapped))
    return {
        "batch": block.batch,
        "bucket": block.bucket,
        "hooked": times,
        "backward_began": begins,
        "forward_waited": waited,
        "buckets": buckets,
        "sizes": sizes,
        "logged": [spans for spans in logged[1:] if spans is not None],
        "on_host": run.subject.device.type == "cpu",
    }


def _alone(run: _Run, block: Block) -> Record | None:
    """Steps of rank 0 without DDP, while the other ranks are idle."""
    _unwrap(run)
    batch = _batch(run, block.batch)
    module = run.subject.module
    estimate_ns = _untimed(run, module, batch, block.batch) if run.rank == 0 else 0
    count = _agree(run, estimate_ns)
    if count == _STOPPED:
        return None
    times: list[list[int]] = []
    if run.rank == 0:
        _untimed(run, module, batch, block.batch)
        times = _timed(run, module, batch, block.batch, count)
    _wait_for_all(run)
    return {"batch": block.batch, "alone": times}


def _reduce(run: _Run, block: Block) -> Record | None:
    """All_reduces of one size, as many as make up the gradients."""
    _unwrap(run)
    total = run.subject.gradient_bytes()
    at_once = reduces_at_once(block.size_bytes, total)
    length = at_once * block.size_bytes // 4
    gradients = torch.zeros(length, dtype=torch.float32, device=run.subject.device)
    bucket = torch.zeros_like(gradients)

    def once() -> None:
        reduce_as_ddp_does(gradients, bucket, block.size_bytes, at_once, run.ranks)

    once()
    before_ns = time.perf_counter_ns()
    once()
    count = _agree(run, time.perf_counter_ns() - before_ns)
    if count == _STOPPED:
        return None
    _wait_for_all(run)
    cpu_ns = time.process_time_ns()
    for _ in range(count):
        run.clock.stamp()
        once()
        run.clock.stamp()
    cpu_ns = time.process_time_ns() - cpu_ns
    times = [parts[0] for parts in run.clock.take_ns(2)]
    return {
        "size_bytes": block.size_bytes,
        "at_once": at_once,
        "reduce": times,
        "busy": cpu_ns / max(sum(times), 1),
    }


_KINDS = {"plain": _plain, "hooked": _hooked, "alone": _alone, "reduce": _reduce}


# -- a step ----------------------------------------------------------------------------


def _timed(run: _Run, model: nn.Module, batch: Any, size: int, count: int) -> list[list[int]]:
    """`count` steps back to back; the times of each forward, backward and optimizer step in ns."""
    stamp, forward, optimizer = run.clock.stamp, run.feed.run, run.optimizer
    with users_code(_AT_BATCH.format(size)):
        for _ in range(count):
            stamp()
            loss = forward(model, batch)
            stamp()
            loss.backward()  # type: ignore[no-untyped-call]
            stamp()
            optimizer.step()
            optimizer.zero_grad()
            stamp()
    return run.clock.take_ns(_PARTS)


def _untimed(run: _Run, model: nn.Module, batch: Any, size: int) -> int:
    """A step for warm-up; about how long it took, in nanoseconds."""
    return sum(_timed(run, model, batch, size, 1)[0])


def _batch(run: _Run, size: int) -> Any:
    """A batch, made once."""
    if size not in run.batches:
        run.batches[size] = run.feed.batch(size)
    return run.batches[size]


def _wrap(run: _Run, block: Block) -> DistributedDataParallel:
    """The DDP object of a block; that of the block before if it has the same options."""
    wanted = (block.kind, block.bucket, block.round)
    if run.wrapped is not None and run.wrapped_for == wanted:
        return run.wrapped
    _unwrap(run)
    options = dict(run.subject.options)
    size = run.plan.bucket_mb(block.bucket)
    if size is not None:
        options["bucket_cap_mb"] = size
    wrapped = run.wrapped = DistributedDataParallel(run.subject.module, **options)
    run.wrapped_for = wanted
    if block.kind == "hooked":
        run.stamps = Stamps(wrapped, run.queue)
        torch_private.log_each_step(wrapped)
    batch = _batch(run, run.plan.batches[0])
    for _ in range(_WARM_UP):
        _untimed(run, wrapped, batch, run.plan.batches[0])
    return wrapped


def _unwrap(run: _Run) -> None:
    """Let the DDP object go, and its hooks on the parameters with it."""
    if run.wrapped is not None:
        run.wrapped = run.stamps = run.wrapped_for = None
        gc.collect()  # it is part of a cycle


# -- together --------------------------------------------------------------------------


def _agree(run: _Run, estimate_ns: float, kinds: int = 1) -> int:
    """How many steps all ranks time now, decided by rank 0; `_STOPPED` if a rank was stopped."""
    count = 0
    if run.rank == 0:
        left_ns = max(run.deadline_ns - time.perf_counter_ns(), 0)
        count = run.plan.steps(estimate_ns, left_ns, run.left, kinds)
    shared = torch.tensor([int(run.stopped()), count], device=run.subject.device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    stop, count = (int(number) for number in shared.tolist())
    return _STOPPED if stop else count


def _is_spent(run: _Run) -> bool:
    """True on all ranks if the budget is spent, by rank 0's clock."""
    spent = run.rank == 0 and time.perf_counter_ns() > run.deadline_ns
    shared = torch.tensor([int(spent)], device=run.subject.device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return bool(shared.item())


def _wait_for_all(run: _Run) -> None:
    """Returns when every rank has called it and the device is idle."""
    # ProcessGroupNCCL implements its barrier so; `dist.barrier` would have to guess the device.
    dist.all_reduce(torch.zeros(1, device=run.subject.device))
    if run.subject.device.type == "cuda":
        torch.cuda.synchronize(run.subject.device)


def try_batches(subject: Subject, feed: Feed, batches: Sequence[int]) -> tuple[list[int], str]:
    """The batches with which a step succeeds on this rank, and what the next one raised.

    Without communication: if a rank fails here, no other waits for it.
    """
    works: list[int] = []
    for size in batches:
        try:
            with users_code(_AT_BATCH.format(size)):
                loss = feed.run(subject.module, feed.batch(size))
                if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
                    raise TypeError("the loss is no scalar tensor, so there is no backward from it")
                loss.backward()  # type: ignore[no-untyped-call]
        except Unusable as error:
            return works, str(error)
        finally:
            subject.module.zero_grad(set_to_none=True)
        works.append(size)
    return works, ""
