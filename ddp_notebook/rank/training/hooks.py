"""Hooks in torch that count what happens to replicas, optimizers and samplers.

Methods of public classes are patched. If our code fails, the counters disable themselves, and the
summary of the run says so.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader, DistributedSampler

from ddp_notebook.rank import gpu, torch_private
from ddp_notebook.rank.collectives.call_sites import CallSites
from ddp_notebook.rank.collectives.observer import Observer
from ddp_notebook.rank.component import Component, Run
from ddp_notebook.rank.setup.subgroups import Subgroups
from ddp_notebook.rank.training import ddp, step_marks
from ddp_notebook.rank.training.facts import RunSummary
from ddp_notebook.rank.training.held import Held
from ddp_notebook.rank.training.inputs import Samplers
from ddp_notebook.rank.training.patching import ModuleHook, Patches
from ddp_notebook.rank.training.step_marks import StepMarks
from ddp_notebook.rank.training.tracker import Replica, Tracker

_IN_A_CHILD = "a forked child"


@dataclass(eq=False)
class TrainingHooks(Component):
    """The hooks, each installed once."""

    observer: Observer
    call_sites: CallSites
    tracker: Tracker
    samplers: Samplers
    summary: RunSummary
    subgroups: Subgroups
    marks: StepMarks

    def __post_init__(self) -> None:
        self._patches = Patches(self._off, self.tracker.disable)
        self.ledger: Any = None
        """The `StepLedger` of the last run; None unless that was asked for one."""

    def attach(self) -> None:
        """Count everything from now on."""
        patch, samplers, tracker = self._patches.patch, self.samplers, self.tracker
        patch(DistributedDataParallel, "__init__", after=self._made)
        patch(DistributedDataParallel, "forward", self._forward_begins, self._forward_ends)
        # `Tensor.backward` calls it through its module: one patch sees both. `torch.autograd.grad`
        # is left alone: DDP reduces nothing in it.
        patch(torch.autograd, "backward", self._backward_begins, self._backward_ends)
        patch(DistributedSampler, "set_epoch", after=lambda *given: samplers.epoch_set(given[2]))
        patch(DistributedSampler, "__iter__", _of_first(samplers.sampled))
        patch(DataLoader, "__iter__", _of_first(samplers.loaded))
        patch(torch.nn.Module, "load_state_dict", _of_first(tracker.module_loads))
        patch(torch.optim.Optimizer, "load_state_dict", _of_first(tracker.optimizer_loads))
        patch(ReduceLROnPlateau, "step", self._plateau_steps, self._plateau_stepped)
        iterator = torch_private.loader_iterator()
        if iterator is not None:
            mark = self.marks.mark
            patch(
                iterator,
                "__next__",
                lambda *_call: mark(step_marks.LOADING),
                lambda *_call: mark(step_marks.LOADED),
            )
        # `weakref.finalize` would call when the object is gone, and what is kept of it is read from
        # it.
        if not hasattr(DistributedDataParallel, "__del__"):
            observer, summary, is_finalizing = self.observer, self.summary, sys.is_finalizing

            # A script's objects are gone when it is over.
            def __del__(wrapped: DistributedDataParallel) -> None:  # noqa: N807  # Python's name
                # Python clears modules, ours too, and tensors: torch aborts if they are used then.
                if is_finalizing():
                    return
                try:
                    group = getattr(wrapped, "process_group", None)
                    if group is not None and torch_private.is_forgotten(group):
                        observer.hold_until_the_next(group)
                    if not tracker.broken:
                        tracker.died(wrapped, summary.of_dying(wrapped))
                except Exception as error:  # noqa: BLE001  # also while Python itself ends
                    tracker.disable(error)

            DistributedDataParallel.__del__ = __del__  # type: ignore[attr-defined]
        self.observer.on_bucket = self._patches.contained(self._bucket)
        self._bypassed = self._patches.contained(self._look_at_bypass)
        tracker.split.trains = samplers.forward
        register_optimizer_step_pre_hook(self._patches.contained(self._before_step))
        register_optimizer_step_post_hook(self._patches.contained(self._after_step))
        torch_private.without_hooks_while_scripting(lambda hook: isinstance(hook, ModuleHook))
        os.register_at_fork(after_in_child=self._leave_child_alone)

    def run_ends(self) -> None:
        """End an evaluation that the run ended with, and the ledger."""
        if self.ledger is not None:
            self._patches.contained(self.ledger.end)()
        self._patches.contained(self.tracker.split.take_out)()
        for replica in self.tracker.replicas.values():
            self._patches.contained(replica.moments.backward)()

    def run_begins(self, run: Run) -> None:
        """Forget the counts of the last run."""
        for component in (self.tracker, self.marks, self.samplers):
            self._patches.contained(component.begin)()
        self.observer.backwards = 0
        self.ledger = None
        if run.ledger:
            from ddp_notebook.rank.training.ledger import StepLedger  # loaded only if asked for

            held, rank = Held(self.summary.names), self.summary.process.rank
            self.ledger = StepLedger(self.tracker, held, rank, run)

    def trained(self) -> bool:
        """True if ranks can be compared: a model was trained or used, or a handle is left open."""
        tracker = self.tracker
        stepped = any(optimizer.steps for optimizer in tracker.optimizers.values())
        used = any(replica.used for replica in (*tracker.gone, *tracker.replicas.values()))
        return not tracker.broken and (stepped or used or self.observer.works.suspicious)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """A context in which nothing is counted: the benchmark trains, not the user."""
        before = self.tracker.broken
        self.tracker.broken = before or "suspended"
        try:
            yield
        finally:
            self.tracker.broken = before

    def reattach(self) -> tuple[str, ...]:
        """Give DDP objects of a destroyed group the new default group; returns which could not.

        Called when every rank has the new group, so that they continue to train together.
        """
        left = []
        world = torch.distributed.group.WORLD
        for replica in list(self.tracker.replicas.values()):
            wrapped = replica.ref()
            if wrapped is None or world is None:
                continue
            group = wrapped.process_group
            if torch_private.is_forgotten(group):
                group = world
            elif group not in self.subgroups.made_again:
                continue
            if not ddp.reattach(wrapped, group):
                left.append(replica.type)
        return tuple(left)

    # -- failing, and being off ------------------------------------------------------------

    def _off(self) -> bool:
        # A compiler that traces through must not see the counters: it would compile them in.
        return bool(self.tracker.broken) or torch.compiler.is_compiling()

    def _leave_child_alone(self) -> None:
        """In a forked child: a worker that loads data is no rank."""
        self.tracker.broken = _IN_A_CHILD

    def count_in_child(self) -> None:
        """In a forked child that is a rank: count from now on."""
        if self.tracker.broken == _IN_A_CHILD:
            self.tracker.broken = ""

    # -- what is told ----------------------------------------------------------------------

    def _made(
        self, done: bool, _token: Any, wrapped: DistributedDataParallel, _result: None
    ) -> None:
        if not done or getattr(wrapped, "reducer", None) is None:
            return
        replica = self.tracker.replica(wrapped)
        replica.place = self.call_sites.users_line()
        module = replica.module()
        hooks = module._forward_pre_hooks.values() if module is not None else ()
        # One that is wrapped again has it already, and a copy of one.
        if module is not None and not any(type(hook) is ModuleHook for hook in hooks):
            replica.handle = module.register_forward_pre_hook(ModuleHook(self._bypassed))

    def _forward_begins(
        self, args: tuple[Any, ...], named: dict[str, Any], compiler: Any
    ) -> Replica:
        # Once torch compiles what is called from here, no hook may be on the module: torch compiles
        # a module with hooks otherwise, or not at all. A forward past the object is missed then.
        wrapped, tracker, samplers = args[0], self.tracker, self.samplers
        inputs = args[1:], named
        replica = tracker.replica(wrapped)
        if compiler is not None:
            replica.take_out()
        if not torch.is_grad_enabled():
            replica.inside += 1
            replica.moments.evaluates(wrapped.module, inputs, tracker.backwards, samplers.current)
            return replica
        replica.enter(wrapped.require_backward_grad_sync)
        replica.moments.trains(inputs, samplers.iterations)
        if samplers.current is not None:
            samplers.forward(inputs)
        self.marks.mark(step_marks.FORWARD)
        return replica

    def _forward_ends(
        self, done: bool, replica: Replica | None, _wrapped: Any, result: object
    ) -> None:
        if replica is not None:
            replica.inside -= 1
            if torch.is_grad_enabled():
                if done and not isinstance(result, torch.Tensor):
                    replica.tells_all = False
                self.marks.mark(step_marks.FORWARDED)

    def _look_at_bypass(self, module: torch.nn.Module, inputs: Any) -> None:
        """A forward of a module begins that a DDP object contains, or of a copy of one."""
        tracker = self.tracker
        replica = tracker.inside_of(module)
        if replica is None or tracker.broken:  # the hook asks the compiler itself
            return
        if torch.is_grad_enabled():
            # It may come through the wrapper.
            if not replica.inside and replica.ref() is not None:
                replica.bypass()
            self.marks.mark(step_marks.INNER)
        elif not replica.inside:
            current = self.samplers.current
            replica.moments.evaluates(module, inputs, tracker.backwards, current)

    def _backward_begins(self, args: tuple[Any, ...], named: dict[str, Any], _: Any) -> Any:
        tracker = self.tracker
        self.samplers.backward()  # before the tracker: what is trained on is no evaluation's
        tracker.backward(args[0] if args else named.get("tensors"))
        self.observer.backwards = tracker.backwards
        # The frame of `patched`, and the one in which the user's call of it is.
        outer = self.call_sites.backward_begins(sys._getframe(2))
        self.marks.mark(step_marks.BACKWARD, tracker.backwards)
        return (outer,)

    def _backward_ends(self, done: bool, outer: Any, _tensors: Any, _result: None) -> None:
        if outer is not None:
            self.call_sites.backward_ends(*outer)
        if done:
            self.marks.reduced()
            self.tracker.backward_over()

    def _bucket(self, args: Sequence[Any]) -> None:
        """A collective of a backward begins: DDP's reducer hands over a bucket, or FSDP a unit."""
        if not args or self.tracker.broken:
            return
        self.marks.bucket()
        # What is to be summed comes in a list of one tensor. FSDP's other methods begin with the
        # tensor that is to be filled, whose values mean nothing yet.
        tensors = args[0]
        if type(tensors) is list and len(tensors) == 1 and isinstance(tensors[0], torch.Tensor):
            self.tracker.bucket(tensors[0])

    def _before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _named: Any) -> None:
        # The mark comes first, so that what is counted here falls into the optimizer's part.
        if not self._off():
            self.marks.mark(step_marks.STEP)
            self.tracker.step_begins(optimizer)
            self.observer.works.step(
                parameter for group in optimizer.param_groups for parameter in group["params"]
            )

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _named: Any) -> None:
        if not self._off():
            self.tracker.stepped(optimizer)
            for replica in self.tracker.replicas.values():
                replica.moments.stepped(self.samplers.iterations)
            self.marks.mark(step_marks.STEPPED)

    def _plateau_steps(self, args: tuple[Any, ...], named: dict[str, Any], _: Any) -> Any:
        return args[1] if len(args) > 1 else named.get("metrics")

    def _plateau_stepped(self, done: bool, metric: Any, scheduler: Any, _result: None) -> None:
        # After torch has read it, which waits for a GPU.
        if done and not (isinstance(metric, torch.Tensor) and not gpu.is_readable(metric)):
            with contextlib.suppress(TypeError, ValueError):
                self.tracker.metric(scheduler.optimizer, float(metric))


def _of_first(tell: Callable[[Any], None]) -> Callable[..., None]:
    """Return what tells of a method that its object was called."""
    return lambda args, _named, _compiler: tell(args[0])
