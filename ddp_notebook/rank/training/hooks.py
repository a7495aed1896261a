"""Has torch tell of what it does with replicas, optimizers and samplers: `attach` once.

Public classes' methods are wrapped; each tells the counters first and then does what it did.
What of ours fails takes itself out, and is told with the facts.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, DistributedSampler

from ddp_notebook.rank import torch_private
from ddp_notebook.rank.collectives import call_sites, observer
from ddp_notebook.rank.setup import subgroups
from ddp_notebook.rank.training import ddp, facts
from ddp_notebook.rank.training.data_parallel import parallels
from ddp_notebook.rank.training.replicas import tracker
from ddp_notebook.rank.training.samplers import sources

_ATTACHED = "__ddp_notebook_attached__"


def attach() -> bool:
    """Have everything counted from now on; False when that was done before."""
    if hasattr(DistributedDataParallel, _ATTACHED):
        return False
    setattr(DistributedDataParallel, _ATTACHED, True)
    _wrap_ddp()
    _wrap_backward()
    _tell_after(DistributedSampler, "set_epoch", sources.epoch_set)
    _tell_before(DistributedSampler, "__iter__", sources.sampled)
    _tell_before(DataLoader, "__iter__", sources.loaded)
    _tell_before(DataParallel, "forward", parallels.forward)
    register_optimizer_step_post_hook(_after_step)
    torch_private.without_hooks_while_scripting(lambda hook: isinstance(hook, _BypassHook))
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_leave_child_alone)
    return True


def begin() -> None:
    """A cell or a script begins. Raises nothing."""
    with _ours():
        tracker.begin()
        sources.begin()
        parallels.begin()


def happened() -> bool:
    """True when an optimizer has made a step for a DDP or DataParallel object in this run."""
    known = (*tracker.gone, *tracker.replicas.values())
    stepped = parallels.trained or any(replica.steps for replica in known)
    return not tracker.broken and stepped


class _ours(contextlib.AbstractContextManager[None]):  # noqa: N801  # reads as a statement
    """What fails within is our defect: the user's code goes on, and we count no more."""

    __slots__ = ()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        _failed(error)
        return True


def _failed(error: Exception) -> None:
    tracker.take_out(error)
    observer.observer.on_bucket = None


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Within, nothing is counted: what trains is a benchmark of ours, not the user's job."""
    before = tracker.broken
    tracker.broken = before or "paused"
    try:
        yield
    finally:
        tracker.broken = before


def _off() -> bool:
    # A compiler that traces through must not see our counters: it would compile them in.
    return bool(tracker.broken) or torch.compiler.is_compiling()


def _tell_before(owner: Any, name: str, tell: Callable[[Any], None]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def told(self: Any, *args: Any, **named: Any) -> Any:
        if not _off():
            with _ours():
                tell(self)
        return original(self, *args, **named)

    setattr(owner, name, told)


def _tell_after(owner: Any, name: str, tell: Callable[[Any], None]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def told(self: Any, *args: Any, **named: Any) -> Any:
        result = original(self, *args, **named)
        if not _off():
            with _ours():
                tell(self)
        return result

    setattr(owner, name, told)


def _wrap_ddp() -> None:
    _tell_after(DistributedDataParallel, "__init__", _made)
    original: Callable[..., Any] = DistributedDataParallel.forward

    @functools.wraps(original)
    def forward(self: Any, *inputs: Any, **named: Any) -> Any:
        __tracebackhide__ = True  # IPython leaves the frame out of the user's traceback
        if _off() or not torch.is_grad_enabled():
            return original(self, *inputs, **named)
        replica = None
        with _ours():
            replica = tracker.replica(self)
            replica.enter(self.require_backward_grad_sync)
            if sources.current is not None:
                sources.forward(inputs)
        try:
            return original(self, *inputs, **named)
        finally:
            if replica is not None:
                replica.inside -= 1

    DistributedDataParallel.forward = forward  # type: ignore[method-assign]
    if not hasattr(DistributedDataParallel, "__del__"):
        DistributedDataParallel.__del__ = _about_to_go  # type: ignore[attr-defined]


def _made(wrapped: DistributedDataParallel) -> None:
    if getattr(wrapped, "reducer", None) is None:
        return
    module = tracker.replica(wrapped).module()
    if module is not None and not any(
        isinstance(hook, _BypassHook) for hook in module._forward_pre_hooks.values()
    ):
        module.register_forward_pre_hook(_BypassHook())


class _BypassHook:
    """On the module inside a DDP object: sees forwards that do not come through the wrapper.

    In a copy it does nothing, and in a pickle it is a function of the standard library's that
    does nothing: files must not need us.
    """

    __slots__ = ()

    def __call__(self, module: torch.nn.Module, _inputs: Any) -> None:
        if not _off() and torch.is_grad_enabled():
            with _ours():
                tracker.bypass(module)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")

    def __copy__(self) -> _BypassHook:
        return self

    def __deepcopy__(self, _memo: Any) -> _BypassHook:
        return self


def _about_to_go(wrapped: DistributedDataParallel) -> None:
    """A DDP object is finalised, whole yet: a script's own are gone when it is over."""
    try:
        group = getattr(wrapped, "process_group", None)
        if group is not None and torch_private.is_forgotten(group):
            observer.observer.hold_until_the_next(group)
        if not tracker.broken:
            tracker.died(wrapped, facts.of_dying(wrapped))
    except Exception as error:  # noqa: BLE001  # also while Python itself ends
        tracker.take_out(error)


def _wrap_backward() -> None:
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **named: Any) -> Any:
        __tracebackhide__ = True
        if _off():
            return original(tensors, *args, **named)
        outer = None
        with _ours():
            tracker.backward(tensors)
            sources.backward()
            outer = call_sites.backward_begins(sys._getframe(1))
        try:
            return original(tensors, *args, **named)
        finally:
            call_sites.backward_ends(outer)

    torch.autograd.backward = backward
    observer.observer.on_bucket = _bucket


def _bucket(gradients: Any) -> None:
    if not tracker.broken:
        try:
            tracker.bucket(gradients[0])
        except Exception as error:  # noqa: BLE001  # ours to solve, not the user's
            _failed(error)


def _after_step(optimizer: torch.optim.Optimizer, _args: Any, _named: Any) -> None:
    if not _off():
        with _ours():
            tracker.stepped(optimizer)
            parallels.stepped(optimizer)


def _leave_child_alone() -> None:
    """In a forked child: a worker that loads data is no rank."""
    tracker.broken = "a forked child"


def reattach() -> tuple[str, ...]:
    """Give DDP objects whose group was destroyed the new default group; which could not be.

    Called when every rank has the new group: they go on training in step.
    """
    left = []
    group = torch.distributed.group.WORLD
    for replica in list(tracker.replicas.values()):
        wrapped = replica.ref()
        if wrapped is None or group is None:
            continue
        its_group = wrapped.process_group
        if torch_private.is_forgotten(its_group):
            its_group = group
        elif its_group not in subgroups.made_again:
            continue
        if not ddp.reattach(wrapped, its_group):
            left.append(replica.type)
    return tuple(left)
