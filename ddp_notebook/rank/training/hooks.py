"""Hooks in torch that count what happens to replicas, optimizers and samplers.

Methods of public classes are wrapped; each updates the counters and then calls the original. If our
code fails, the counters disable themselves, and the summary of the run says so.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader, DistributedSampler

from ddp_notebook.rank import torch_private
from ddp_notebook.rank.collectives.call_sites import CallSites
from ddp_notebook.rank.collectives.observer import Observer
from ddp_notebook.rank.component import Component, Run
from ddp_notebook.rank.setup.subgroups import Subgroups
from ddp_notebook.rank.training import ddp, step_marks
from ddp_notebook.rank.training.data_parallel import DataParallelTracking
from ddp_notebook.rank.training.facts import RunSummary
from ddp_notebook.rank.training.gradients import Hooked
from ddp_notebook.rank.training.parallel.module_hook import ModuleHook
from ddp_notebook.rank.training.parallel.plain import PlainModel
from ddp_notebook.rank.training.replicas import Tracker
from ddp_notebook.rank.training.samplers import Samplers
from ddp_notebook.rank.training.saves import Saves
from ddp_notebook.rank.training.step_marks import StepMarks
from ddp_notebook.rank.training.tracked import Replica

_IN_A_CHILD = "a forked child"


class TrainingHooks(Component):
    """The hooks, each installed once. They run in every step, so what they call is bound early."""

    def __init__(
        self,
        observer: Observer,
        call_sites: CallSites,
        tracker: Tracker,
        samplers: Samplers,
        data_parallel: DataParallelTracking,
        saves: Saves,
        summary: RunSummary,
        subgroups: Subgroups,
        marks: StepMarks,
    ) -> None:
        self._observer = observer
        self._call_sites = call_sites
        self._tracker = tracker
        self._samplers = samplers
        self._data_parallel = data_parallel
        self._saves = saves
        self._summary = summary
        self._subgroups = subgroups
        self._marks = marks
        self._contained = _Contained(self._disable)

    def attach(self) -> None:
        """Count everything from now on."""
        self._wrap_ddp()
        self._wrap_comm_hooks()
        self._wrap_backward()
        self._tell_after(DistributedSampler, "set_epoch", self._samplers.epoch_set)
        self._tell_before(DistributedSampler, "__iter__", self._samplers.sampled)
        self._tell_before(DataLoader, "__iter__", self._samplers.loaded)
        self._mark_loading()
        self._saves.attach(self._off)
        self._tracker.split.trains = self._fed
        self._tracker.plain.tell = self._plain_forward
        self._tracker.plain.hook_copy = self._hook_copy
        self._tell_before(DataParallel, "forward", self._data_parallel.forward)
        self._tell_before(torch.nn.Module, "load_state_dict", self._loads)
        self._tell_before(torch.nn.Module, "eval", self._tracker.judged)
        self._tell_before(torch.optim.Optimizer, "load_state_dict", self._tracker.optimizer_loads)
        self._tell_before(torch.amp.GradScaler, "step", self._tracker.scaler_steps)
        self._wrap_plateau()
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        torch_private.without_hooks_while_scripting(lambda hook: isinstance(hook, ModuleHook))
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._leave_child_alone)

    def run_ends(self) -> None:
        """End an evaluation that the run ended with."""
        with self._contained:
            self._tracker.split.take_out()
            self._tracker.plain.take_out()
            for replica in self._tracker.replicas.values():
                replica.moments.backward()

    def run_begins(self, run: Run) -> None:
        """Forget the counts of the last run."""
        with self._contained:
            self._tracker.begin()
            self._marks.begin()
            self._samplers.begin()
            self._data_parallel.begin()
            self._saves.begin()

    def trained(self) -> bool:
        """True if an optimizer has made a step in this run, or was to; or ranks have summed up what
        an evaluation came to; or a handle was not waited for.
        """
        tracker = self._tracker
        stepped = any(optimizer.steps for optimizer in tracker.optimizers.values())
        stepped = stepped or tracker.skipped > 0 or self._observer.works.suspicious
        return not tracker.broken and (stepped or tracker.summed_up)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """A context in which nothing is counted: the benchmark trains, not the user."""
        before = self._tracker.broken
        self._tracker.broken = before or "suspended"
        try:
            yield
        finally:
            self._tracker.broken = before

    def reattach(self) -> tuple[str, ...]:
        """Give DDP objects of a destroyed group the new default group; returns which could not.

        Called when every rank has the new group, so that they continue to train together.
        """
        left = []
        world = torch.distributed.group.WORLD
        for replica in list(self._tracker.replicas.values()):
            wrapped = replica.ref()
            if wrapped is None or world is None:
                continue
            group = wrapped.process_group
            if torch_private.is_forgotten(group):
                group = world
            elif group not in self._subgroups.made_again:
                continue
            if not ddp.reattach(wrapped, group):
                left.append(replica.type)
        return tuple(left)

    # -- failing, and being off ------------------------------------------------------------

    def _disable(self, error: Exception) -> None:
        self._tracker.disable(error)
        self._observer.on_bucket = lambda args: None

    def _off(self) -> bool:
        # A compiler that traces through must not see the counters: it would compile them in.
        return bool(self._tracker.broken) or torch.compiler.is_compiling()

    def _leave_child_alone(self) -> None:
        """In a forked child: a worker that loads data is no rank."""
        self._tracker.broken = _IN_A_CHILD

    def count_in_child(self) -> None:
        """In a forked child that is a rank: count from now on."""
        if self._tracker.broken == _IN_A_CHILD:
            self._tracker.broken = ""

    # -- the hooks -------------------------------------------------------------------------

    def _tell_before(self, owner: Any, name: str, tell: Callable[[Any], None]) -> None:
        original = getattr(owner, name)
        off, contained = self._off, self._contained

        @functools.wraps(original)
        def hooked(self: Any, *args: Any, **named: Any) -> Any:
            __tracebackhide__ = True
            if not off():
                with contained:
                    tell(self)
            return original(self, *args, **named)

        setattr(owner, name, hooked)

    def _tell_after(self, owner: Any, name: str, tell: Callable[[Any], None]) -> None:
        original = getattr(owner, name)
        off, contained = self._off, self._contained

        @functools.wraps(original)
        def hooked(self: Any, *args: Any, **named: Any) -> Any:
            __tracebackhide__ = True
            result = original(self, *args, **named)
            if not off():
                with contained:
                    tell(self)
            return result

        setattr(owner, name, hooked)

    def _wrap_plateau(self) -> None:
        original = ReduceLROnPlateau.step
        off, contained, metric = self._off, self._contained, self._tracker.metric

        @functools.wraps(original)
        def step(self: Any, metrics: Any, *args: Any, **named: Any) -> Any:
            __tracebackhide__ = True
            if not off():
                with contained, contextlib.suppress(TypeError, ValueError):
                    metric(self.optimizer, float(metrics))  # as torch does itself
            return original(self, metrics, *args, **named)

        ReduceLROnPlateau.step = step  # type: ignore[method-assign]

    def _mark_loading(self) -> None:
        iterator = torch_private.loader_iterator()
        if iterator is None:
            return
        original = iterator.__next__
        off, contained, mark = self._off, self._contained, self._marks.mark
        given = self._samplers.given

        @functools.wraps(original)
        def batch(self: Any) -> Any:
            __tracebackhide__ = True
            if off():
                return original(self)
            with contained:
                mark(step_marks.LOADING)
            try:
                return original(self)
            finally:
                with contained:
                    mark(step_marks.LOADED)
                    given()

        iterator.__next__ = batch

    def _wrap_ddp(self) -> None:
        self._tell_after(DistributedDataParallel, "__init__", self._made)
        original: Callable[..., Any] = DistributedDataParallel.forward
        off, contained = self._off, self._contained
        tracker, samplers, mark = self._tracker, self._samplers, self._marks.mark
        compilers_callback = torch_private.compilers_callback

        def begins(self: Any, inputs: Any, named: Any, callback: Any) -> Replica | None:
            replica = None
            with contained:
                replica = tracker.replica(self)
                if callback is not None:
                    replica.take_out()
                if not torch.is_grad_enabled():
                    replica.inside += 1
                    tracker.evaluation = replica.moments.evaluates(
                        self.module, (inputs, named), tracker.backwards, samplers.current
                    )
                else:
                    replica.enter(self.require_backward_grad_sync, self.module.training)
                    tracker.feeds(replica, (inputs, named))
                    replica.moments.trains(self.module, (inputs, named), samplers.iterations)
                    if samplers.current is not None:
                        samplers.forward((inputs, named))
                    mark(step_marks.FORWARD)
            return replica

        def ends(replica: Replica) -> None:
            replica.inside -= 1
            if torch.is_grad_enabled():
                mark(step_marks.FORWARDED)

        @functools.wraps(original)
        def forward(self: Any, *inputs: Any, **named: Any) -> Any:
            __tracebackhide__ = True  # IPython leaves the frame out of the user's traceback
            if off():
                return original(self, *inputs, **named)
            replica = begins(self, inputs, named, compilers_callback())
            try:
                return original(self, *inputs, **named)
            finally:
                if replica is not None:
                    ends(replica)

        for ours in (begins, ends, TrainingHooks._off, ModuleHook.__call__):
            torch_private.keep_from_compiler(ours)
        torch_private.keep_from_compiler(forward, inner_too=False)
        DistributedDataParallel.forward = forward  # type: ignore[method-assign]
        if not hasattr(DistributedDataParallel, "__del__"):
            about_to_go, is_finalizing = self._about_to_go, sys.is_finalizing

            def __del__(self: DistributedDataParallel) -> None:  # noqa: N807  # Python's name
                # Python clears modules, ours too, and tensors: torch aborts if they are used then.
                if not is_finalizing():
                    about_to_go(self)

            DistributedDataParallel.__del__ = __del__  # type: ignore[attr-defined]

    def _wrap_comm_hooks(self) -> None:
        original = DistributedDataParallel.register_comm_hook
        off, contained, tracker = self._off, self._contained, self._tracker

        @functools.wraps(original)
        def register(self: Any, state: object, hook: Any) -> None:
            __tracebackhide__ = True
            if off() or not torch_private.is_users_hook(hook):
                original(self, state, hook)
                return
            hooked = Hooked()

            @functools.wraps(hook)
            def sampled(state: Any, bucket: Any) -> Any:
                if not off():
                    with contained:
                        hooked.bucket(bucket)
                return hook(state, bucket)

            original(self, state, sampled)
            with contained:
                tracker.replica(self).hooked = hooked

        DistributedDataParallel.register_comm_hook = register  # type: ignore[method-assign]

    def _made(self, wrapped: DistributedDataParallel) -> None:
        if getattr(wrapped, "reducer", None) is None:
            return
        replica = self._tracker.replica(wrapped)
        module = replica.module()
        if module is not None and not _is_hooked(module):
            replica.handle = module.register_forward_pre_hook(ModuleHook(self._bypassed))

    def _loads(self, module: torch.nn.Module) -> None:
        if not self._tracker.has_inside(module) and _is_hooked(module):
            self._tracker.copy_loads(module)
        else:
            self._tracker.module_loads(module)

    def _fed(self, inputs: Any) -> None:
        """A model whose forward communicates gets `inputs`; no DDP object contains it."""
        if self._samplers.current is not None:
            self._samplers.forward(inputs)

    def _plain_forward(self, model: PlainModel, module: torch.nn.Module, inputs: Any) -> None:
        """A forward of a model begins that no DDP object contains."""
        if self._off():
            return
        with self._contained:
            tracker, samplers = self._tracker, self._samplers
            if not torch.is_grad_enabled():
                tracker.evaluation = model.moments.evaluates(
                    module, inputs, tracker.backwards, samplers.current
                )
                return
            model.moments.trains(module, inputs, samplers.iterations)
            if samplers.current is not None and not tracker.split.sees(module):
                samplers.forward(inputs)

    def _hook_copy(self, module: torch.nn.Module) -> None:
        if not _is_hooked(module):
            module.register_forward_pre_hook(ModuleHook(self._bypassed))

    def _bypassed(self, module: torch.nn.Module, inputs: Any) -> None:
        if self._off():
            return
        with self._contained:
            tracker = self._tracker
            if not tracker.has_inside(module):
                if not (torch.is_grad_enabled() and any(map(_is_trained, module.parameters()))):
                    tracker.copy_used(module)
            elif torch.is_grad_enabled():
                tracker.bypass(module)
                self._marks.mark(step_marks.INNER)
            elif (replica := tracker.modules.get(id(module))) is not None and not replica.inside:
                tracker.evaluation = replica.moments.evaluates(
                    module, inputs, tracker.backwards, self._samplers.current
                )

    def _about_to_go(self, wrapped: DistributedDataParallel) -> None:
        """A DDP object is about to be deleted: a script's objects are gone when it is over."""
        try:
            group = getattr(wrapped, "process_group", None)
            if group is not None and torch_private.is_forgotten(group):
                self._observer.hold_until_the_next(group)
            if not self._tracker.broken:
                self._tracker.died(wrapped, self._summary.of_dying(wrapped))
        except Exception as error:  # noqa: BLE001  # also while Python itself ends
            self._tracker.disable(error)

    def _wrap_backward(self) -> None:
        original = torch.autograd.backward
        off, contained = self._off, self._contained
        tracker, samplers, call_sites = self._tracker, self._samplers, self._call_sites
        mark = self._marks.mark

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **named: Any) -> Any:
            __tracebackhide__ = True
            if off():
                return original(tensors, *args, **named)
            outer = None
            with contained:
                samplers.backward()  # before the tracker: what is trained on is no evaluation's
                tracker.backward(tensors)
                outer = call_sites.backward_begins(sys._getframe(1))
                mark(step_marks.BACKWARD, tracker.backwards)
            try:
                result = original(tensors, *args, **named)
            finally:
                call_sites.backward_ends(outer)
            with contained:
                self._marks.reduced()
                tracker.backward_over()
            return result

        torch.autograd.backward = backward
        self._observer.on_bucket = self._bucket
        self._observer.pipelines.found = self._marks.end

    def _bucket(self, args: Sequence[Any]) -> None:
        if args and not self._tracker.broken:
            try:
                self._tracker.bucket(args[0][0])
                self._marks.bucket()
            except Exception as error:  # noqa: BLE001  # ours to solve, not the user's
                self._disable(error)

    def _before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _named: Any) -> None:
        if not self._off():
            with self._contained:
                self._marks.mark(step_marks.STEP)
                self._tracker.step_begins(optimizer)
                self._observer.works.step(
                    parameter for group in optimizer.param_groups for parameter in group["params"]
                )

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _named: Any) -> None:
        if not self._off():
            with self._contained:
                self._tracker.stepped(optimizer)
                self._data_parallel.stepped(optimizer)
                for moments in self._tracker.moments():
                    moments.stepped(self._samplers.iterations)
                self._marks.mark(step_marks.STEPPED)


def _is_hooked(module: torch.nn.Module) -> bool:
    """True of the module of a DDP object, and of its copies."""
    return any(type(hook) is ModuleHook for hook in module._forward_pre_hooks.values())


def _is_trained(parameter: torch.Tensor) -> bool:
    return parameter.requires_grad


class _Contained(contextlib.AbstractContextManager[None]):
    """An error inside is a defect of the hooks: the user's code continues, and counting stops.

    One object for all uses: it has no state, and creating one each time would cost.
    """

    __slots__ = ("_failed",)

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        self._failed(error)
        return True
