"""The benchmark of training steps on this rank: prepared first, then timed block by block.

Everything is done to a copy. The user's parameters, gradients, buffers, mode and random state are
unchanged afterwards, whatever happens.

A step is forward, loss, backward, the optimizer's step and `zero_grad`. The cost of communication
is the time of a DDP step minus that of the same step under `no_sync`.

Sources: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
PVLDB 13 (12), 2020: figure 6 (where a step's time goes), figures 7 and 8 (bucket sizes). DDP's
notes, https://pytorch.org/docs/stable/notes/ddp.html, for buckets and `no_sync`.

Every rank runs the same steps in the same order. Decisions that depend on a clock, or on an event
on one rank (an interrupt, an error), are made by a collective before each block.
"""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from IPython.core.getipython import get_ipython
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.bench.steps import Block, Memory, StepPlan
from ddp_notebook.model import Progress, codec, format_bytes
from ddp_notebook.model.ddp import RankFailure
from ddp_notebook.rank import torch_private
from ddp_notebook.rank.bench import machine, subject
from ddp_notebook.rank.bench.collectives import (
    clock_of,
    groups_of,
    interrupts_noted,
    since_ns,
    spans_ns,
    wait_for_all,
)
from ddp_notebook.rank.bench.subject import Feed, Subject, Unusable, users_code
from ddp_notebook.rank.calls import Nothing, StepsMeasurement, StepsRequest
from ddp_notebook.rank.collectives.observer import Observer
from ddp_notebook.rank.events import EventSender
from ddp_notebook.rank.training import ddp
from ddp_notebook.rank.training.hooks import TrainingHooks
from ddp_notebook.rank.training.inputs import tensors_in

_STOPPED = -1

Answer = dict[str, Any] | RankFailure


class StepsBench:
    """Runs the benchmark of training steps when the session calls it."""

    def __init__(self, sender: EventSender, observer: Observer, hooks: TrainingHooks) -> None:
        self._sender = sender
        self._observer = observer
        self._hooks = hooks
        self._ready: tuple[StepPlan, Subject, Feed] | None = None
        """The run that is prepared and not yet measured or released."""

    def prepare(self, request: StepsRequest) -> Answer:
        """Copy or make the model, try it, and measure its memory. Without communication.

        Returns a description (``title``, ``parameters``, ``gradient_bytes``, ``inputs``,
        ``contents`` as a `Fingerprint`), ``memory`` as in `bench.steps.Memory`, the batches
        that ``work``, and the error ``raised`` by the next. ``communicates`` is True for a model
        whose own forward or backward calls collectives.
        """
        self._ready = None
        return self._answer(lambda _stopped: self._prepare(request))

    def measure(self, request: StepsMeasurement) -> Answer:
        """Measure the prepared model with these batches. All ranks must call it.

        Sends each block as a Progress event; returns whether it ``finished``, how many ``blocks``
        there were, and the load as `machine.Meter` tells it.
        """
        ready, self._ready = self._ready, None
        if ready is None:
            return RankFailure("error", "nothing was prepared")
        with self._observer.suspended():
            return self._answer(lambda stopped: self._measure(*ready, request, stopped))

    def forget(self, _: Nothing) -> None:
        """Release the prepared model."""
        self._ready = None

    def _prepare(self, request: StepsRequest) -> Answer:
        names, device = get_ipython().user_ns, torch.device(request.device)
        plan = codec.decode(StepPlan, request.plan)
        value = names.get(plan.model)
        sharing = len(request.members) if device.type == "cpu" else 1
        # A fifth of what is free is left to other programs.
        allowed = int(machine.free_bytes(device) * 0.8 / sharing)
        if isinstance(value, nn.Module):
            # The model, its gradients, DDP's buckets, and as much again to be safe.
            states = (*value.parameters(), *value.buffers())
            copies = 4 * sum(tensor.numel() * tensor.element_size() for tensor in states)
            if copies > allowed:
                text = f"to train a copy of it takes {format_bytes(copies)}"
                return RankFailure("memory", f"{text}, and {format_bytes(allowed)} are free")
        model = subject.prepare(plan.model, names, request.device)
        feed = subject.feed(model, plan.loss, plan.data, names)
        before = self._observer.issued()
        # Gradients, and DDP's buckets, twice while they are rebuilt.
        fixed = 3 * model.gradient_bytes
        needs = Memory(allowed, fixed, _sample_bytes(model, feed, min(plan.batches)))
        fits = [batch for batch in plan.batches if needs.needs(batch) <= needs.available_bytes]
        works, raised = _try_batches(model, feed, fits)
        self._ready = plan, model, feed
        hooks = torch_private.hook_names(value)
        note = f"{plan.model} has a communication hook, {', '.join(hooks)}: it was measured without"
        return {
            "communicates": self._observer.issued() > before,
            "title": model.title,
            "parameters": sum(p.numel() for p in model.reduced),
            "gradient_bytes": model.gradient_bytes,
            "inputs": feed.text,
            "contents": ddp.contents(model.module),
            "memory": [needs.available_bytes, needs.fixed_bytes, needs.sample_bytes],
            "works": works,
            "raised": raised,
            "notes": [f"{note} it."] if hooks else [],
            "threads": torch.get_num_threads(),
            "backend": str(dist.get_backend()),
            "device": model.device.type,
        }

    def _measure(
        self,
        plan: StepPlan,
        model: Subject,
        feed: Feed,
        request: StepsMeasurement,
        stopped: Callable[[], bool],
    ) -> Answer:
        """Time the blocks; when the budget is spent, the round is finished and no other begins.

        Once it is stopped on one rank, all ranks stop before the next block. Raises Unusable if the
        model raises; the other ranks then wait for this one.
        """
        with groups_of(request.members, request.number) as (some, _):
            # DDP takes all ranks' group as torch names it.
            group = some if len(request.members) < dist.get_world_size() else dist.group.WORLD
            run = _Run(replace(plan, batches=request.batches), model, feed, stopped, group)
            planned = run.plan.schedule(run.ranks)
            schedule = [block for block in planned if request.alone or block.kind != "alone"]
            started, finished, done = machine.Meter.read(), True, 0
            with contextlib.ExitStack() as after:
                # Garbage collection ignores the objects that exist now: a full one takes 0.1 s. The
                # user may have done so before, or the fork server that this rank is from.
                if not gc.get_freeze_count():
                    gc.freeze()
                    after.callback(gc.unfreeze)
                after.callback(self._sender.flush)
                after.callback(run.unwrap)
                for done, block in enumerate(schedule):
                    if done and block.round != schedule[done - 1].round and run.is_spent():
                        break
                    run.left = len(schedule) - done
                    record = run.block(block)
                    if record is None:
                        finished = False
                        break
                    told = {"block": block.number, **asdict(block), **record}
                    total = len(schedule)
                    self._sender.emit(
                        Progress, task="steps", done=done + 1, total=total, value=told
                    )
                else:
                    done = len(schedule)
            spent = started.until(machine.Meter.read())
            return {"finished": finished, "blocks": done, **spent}

    # -- around it -----------------------------------------------------------------------

    def _answer(self, work: Callable[[Callable[[], bool]], Answer]) -> Answer:
        """The result of `work`, or its exception as a failure: the session waits for an answer.

        Meanwhile the board shows what the rank does. `work` gets what tells of an interrupt, which
        is only noted: ranks that stopped at different points would wait for each other.
        """
        with interrupts_noted() as stopped, self._sender.at_work("%ddp_bench: training steps"):
            try:
                with contextlib.ExitStack() as after:
                    after.enter_context(self._hooks.suspended())
                    # Random numbers may be drawn: the random state is restored.
                    numpy: Any = sys.modules.get("numpy")
                    devices = [torch.cuda.current_device()] if torch_private.uses_cuda() else []
                    after.callback(random.setstate, random.getstate())
                    if numpy is not None:
                        after.callback(numpy.random.set_state, numpy.random.get_state())
                    after.enter_context(torch.random.fork_rng(devices))
                    after.enter_context(torch.enable_grad())
                    return work(stopped)
            except Exception as error:  # noqa: BLE001  # the user's model may raise anything
                kind = "memory" if ddp.is_out_of_memory(error.__cause__ or error) else "error"
                known = isinstance(error, Unusable)
                return RankFailure(kind, str(error) if known else subject.on_a_line(error))


def _sample_bytes(model: Subject, feed: Feed, smallest: int) -> float:
    """Return the bytes that a sample needs in a step, from one forward with the smallest batch.

    It counts the tensors that the forward keeps for the backward, and the same again for their
    gradients. Raises what the model raises.
    """
    inputs = feed.batch(smallest)
    parameters = {parameter.data_ptr() for parameter in model.module.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        feed.run(model.module, inputs)
    whole = sum(tensor.nbytes for tensor in tensors_in(inputs)) + 2 * sum(saved.values())
    return whole / smallest


def _try_batches(model: Subject, feed: Feed, batches: Sequence[int]) -> tuple[list[int], str]:
    """Return the batches with which a step succeeds on this rank, and what the next one raised.

    Without communication: if a rank fails here, no other waits for it.
    """
    works: list[int] = []
    for size in batches:
        try:
            with users_code(f"{{}} (batch {size})"):
                loss = feed.run(model.module, feed.batch(size))
                if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
                    raise TypeError("the loss is no scalar tensor, so there is no backward from it")
                loss.backward()  # type: ignore[no-untyped-call]
        except Unusable as error:
            return works, str(error)
        finally:
            model.module.zero_grad(set_to_none=True)
        works.append(size)
    return works, ""


# -- a run -------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Run:
    """One run on one rank: its steps, and what the ranks decide together."""

    plan: StepPlan
    subject: Subject
    feed: Feed
    stopped: Callable[[], bool]
    group: Any
    """The process group of the ranks that take part."""
    deadline_ns: int = 0
    rank: int = field(init=False)
    """In that group."""
    ranks: int = field(init=False)
    left: int = 0
    """The number of blocks left, this one included."""
    _wrapped: DistributedDataParallel | None = None
    _wrapped_for: tuple[str, str, int] | None = None
    _spans: list[list[Any]] = field(default_factory=list)
    """Stamps of when, in the step that runs, each bucket was ready and when it was reduced."""
    _clock: Callable[[], Any] = field(init=False)
    _batches: dict[int, Any] = field(default_factory=dict)
    _optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._clock = clock_of(self.subject.device)
        self.deadline_ns = time.perf_counter_ns() + int(self.plan.budget_s * 1e9)
        # With a learning rate of 0 a step costs the same, and the values do not change: all steps
        # compute with the same numbers, however many there are.
        self._optimizer = torch.optim.SGD(self.subject.module.parameters(), lr=0.0)

    def block(self, block: Block) -> dict[str, Any] | None:
        """Return this rank's measurements in a block; None if a rank was stopped."""
        return {"plain": self._plain, "hooked": self._hooked, "alone": self._alone}[block.kind](
            block
        )

    def _plain(self, block: Block) -> dict[str, Any] | None:
        """DDP steps, and the same under no_sync, in the order A B B A.

        Which kind is A changes from round to round.
        """
        # Why a difference of two kinds of step, and not a hook or DDP's own logger, which both tell
        # when buckets come and go: neither can see that communication slows down the computation
        # beside it, by taking cores and memory bandwidth from it. That is a cost of communication
        # as well, and on a machine whose ranks compute on all cores it is most of the cost.
        #
        # The kinds take turns because a machine drifts, by clock rates and other programs, within
        # seconds. In the order A B B A a drift that is linear in time falls on both alike.
        wrapped = self._wrap(block)
        count = self._agree(self._untimed(wrapped, block.batch), kinds=2)
        if count == _STOPPED:
            return None
        times: dict[str, list[list[int]]] = {"sync": [], "local": []}
        one, other = ("sync", "local") if block.round % 2 == 0 else ("local", "sync")
        for kind in (one, other, other, one):
            with wrapped.no_sync() if kind == "local" else contextlib.nullcontext():
                # The first step after a change of kind is not timed: DDP broadcasts buffers in the
                # forward that follows a step which was reduced, whatever kind it is of itself.
                self._untimed(wrapped, block.batch)
                wait_for_all(self.group, self.subject.device)
                times[kind] += self._timed(wrapped, block.batch, -(-count // 2))
        return times

    def _hooked(self, block: Block) -> dict[str, Any] | None:
        """DDP steps with timestamps of buckets: how much communication the backward overlaps.

        Only a communication hook is called at the moment at which a bucket's last gradient is
        ready (`register_comm_hook`, public API). On a GPU the host is there long before: an event
        in the stream that computes the gradients, and one in the stream that torch has wait for
        the reduced ones (`Future.then`), are stamped by the GPU itself.
        """
        wrapped = self._wrap(block)
        count = self._agree(self._untimed(wrapped, block.batch))
        if count == _STOPPED:
            return None
        wait_for_all(self.group, self.subject.device)
        overlapped = []
        for _ in range(count):
            self._spans.clear()
            start = self._clock()
            self._timed(wrapped, block.batch, 1)
            overlapped.append(overlapped_ns([since_ns(start, span) for span in self._spans]))
        return {"overlapped": overlapped}

    def _alone(self, block: Block) -> dict[str, Any] | None:
        """Steps of rank 0 without DDP, while the other ranks are idle."""
        self.unwrap()
        module, times = self.subject.module, []
        count = self._agree(self._untimed(module, block.batch) if self.rank == 0 else 0)
        if count == _STOPPED:
            return None
        if self.rank == 0:
            self._untimed(module, block.batch)
            times = self._timed(module, block.batch, count)
        wait_for_all(self.group, self.subject.device)
        return {"alone": times}

    # -- a step --------------------------------------------------------------------------

    def _timed(self, model: nn.Module, size: int, count: int) -> list[list[int]]:
        """`count` steps back to back; the times of forward, backward and optimizer step in ns."""
        if size not in self._batches:
            self._batches[size] = self.feed.batch(size)
        batch, forward, optimizer = self._batches[size], self.feed.run, self._optimizer
        clock, stamps = self._clock, []
        with users_code(f"{{}} (batch {size})"):
            # Between the parts of a step there are only clock reads.
            for _ in range(count):
                begin = clock()
                loss = forward(model, batch)
                computed = clock()
                loss.backward()  # type: ignore[no-untyped-call]
                reduced = clock()
                optimizer.step()
                optimizer.zero_grad()
                stamps.append((begin, computed, reduced, clock()))
        return [spans_ns(step) for step in stamps]

    def _untimed(self, model: nn.Module, size: int) -> int:
        """Take a step for warm-up; return about how long it took, in nanoseconds."""
        return sum(self._timed(model, size, 1)[0])

    def _wrap(self, block: Block) -> DistributedDataParallel:
        """Return the DDP object of a block; that of the block before if it has the same options."""
        wanted = (block.kind, block.bucket, block.round)
        if self._wrapped is not None and self._wrapped_for == wanted:
            return self._wrapped
        self.unwrap()
        options = dict(self.subject.options)
        size = self.plan.bucket_mb(block.bucket)
        if size is not None:
            options["bucket_cap_mb"] = size
        module = self.subject.module
        wrapped = self._wrapped = DistributedDataParallel(
            module, process_group=self.group, **options
        )
        self._wrapped_for = wanted
        if block.kind == "hooked":
            wrapped.register_comm_hook(None, self._hook)
        # The first backward has a single bucket, and the buckets are rebuilt in the order in which
        # gradients came when the second begins: only from the third step on they do not change.
        for _ in range(3):
            self._untimed(wrapped, self.plan.batches[0])
        return wrapped

    # Without annotations: torch compares them with its own classes, and here they are strings.
    def _hook(self, state, bucket):  # type: ignore[no-untyped-def]
        """Do what DDP does without a hook, with a stamp before and after it."""
        clock = self._clock
        span = [clock(), clock()]
        self._spans.append(span)
        future = allreduce_hook(self.group, bucket)

        def done(reduced: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            span[1] = clock()
            return reduced.value()

        return future.then(done)

    def unwrap(self) -> None:
        """Let the DDP object go, and its hooks on the parameters with it."""
        if self._wrapped is not None:
            self._wrapped = self._wrapped_for = None
            # It is part of a cycle, and its hooks on the parameters would still reduce gradients in
            # the steps of the next DDP object, or of rank 0 by itself, which no other rank joins.
            gc.collect()

    # -- together ------------------------------------------------------------------------

    def _agree(self, estimate_ns: float, kinds: int = 1) -> int:
        """How many steps all ranks time now, as rank 0 decides; `_STOPPED` if one was stopped."""
        count = 0
        if self.rank == 0:
            left_ns = max(self.deadline_ns - time.perf_counter_ns(), 0)
            count = self.plan.steps(estimate_ns, left_ns, self.left, kinds)
        stop, count = self._largest(int(self.stopped()), count)
        return _STOPPED if stop else count

    def is_spent(self) -> bool:
        """Return True, on all ranks, if the budget is spent, by rank 0's clock."""
        spent = self.rank == 0 and time.perf_counter_ns() > self.deadline_ns
        return bool(self._largest(int(spent))[0])

    def _largest(self, *numbers: int) -> list[int]:
        """Return each number as it is on the rank where it is largest."""
        shared = torch.tensor(numbers, device=self.subject.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self.group)
        return [int(number) for number in shared.tolist()]


def overlapped_ns(spans: Sequence[Sequence[int]]) -> int:
    """Return how long a rank communicated in one step before its last gradient was ready.

    Each bucket is ready and reduced. Several are in flight at once, so the time of communication is
    the union of their spans, not the sum.
    """
    if not spans:
        return 0
    last_ready = max(ready for ready, _ in spans)
    covered, until = 0, 0
    for ready, done in sorted((ready, min(done, last_ready)) for ready, done in spans):
        covered += max(0, done - max(ready, until))
        until = max(until, done)
    return covered
