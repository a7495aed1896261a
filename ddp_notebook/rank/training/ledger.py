"""One training step under the microscope: what its backwards brought, what its optimizers used.

Loaded and installed for a run that was asked for it, and gone when that is over. Nothing here
communicates: the ranks' readings are compared in the notebook. A step is recorded as it is made,
each in place of the one before, until the one that was asked for.
"""

from __future__ import annotations

import contextlib
import math
import weakref
import zlib
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ddp_notebook.model import RankLedger, Reading, Sample, SteppedParameter
from ddp_notebook.rank.inspect.objects import objects_of
from ddp_notebook.rank.training import digests, fsdp_private
from ddp_notebook.rank.training.held import Held, parameters_of, roots
from ddp_notebook.rank.training.patching import Patches
from ddp_notebook.rank.training.tracker import Tracker

_MOST_PARAMETERS = 2000
_MOST_VALUES = 32
"""So many values of a tensor are sampled."""


class StepLedger:
    """Records the training steps of this rank up to `until`; the last one recorded is reported."""

    def __init__(self, tracker: Tracker, held: Held, rank: int, run: int, until: int) -> None:
        self._tracker = tracker
        self._held = held
        self._until = until
        self._rank = rank
        self._run = run
        self._watched: dict[int, _Watched] = {}
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._notes: dict[str, None] = {}
        self._known: object = None
        """What was there when parameters were looked for; None: look again."""
        self._in_step: Optimizer | None = None
        self._over = False
        patches = Patches(lambda: self._over or torch.compiler.is_compiling(), self._failed)
        self._contained = patches.contained
        self._before_patch = torch.autograd.backward
        # Gradients are met by hooks on the parameters. They are put there as a backward begins:
        # only then has FSDP2 made the tensors whose gradients it will reduce.
        patches.patch(torch.autograd, "backward", lambda *_call: self._backward_begins())
        self._patch = torch.autograd.backward
        self._handles = [
            register_optimizer_step_pre_hook(self._contained(self._step_begins)),
            register_optimizer_step_post_hook(self._contained(self._step_ends)),
        ]

    def end(self) -> RankLedger:
        """Take all hooks out; what was recorded."""
        self._over = True
        if torch.autograd.backward is self._patch:  # else another has replaced it since
            torch.autograd.backward = self._before_patch
        watched = self._watched.values()
        for handle in [*self._handles, *(each.handle for each in watched if each.handle)]:
            handle.remove()
        if not any(each.shown for each in watched):
            self._notes["no optimizer made a step: the rows are of the backwards"] = None
            for each in watched:
                each.shown = each.facts() if each.own is not None else None
        shown = tuple(each.shown for each in watched if each.shown is not None)
        return RankLedger(self._rank, self._run, shown, tuple(self._notes))

    def _failed(self, error: Exception) -> None:
        self._over = True
        self._notes[f"recording ended early: {type(error).__name__}: {error}"] = None

    # -- what the run does -----------------------------------------------------------------

    def _backward_begins(self) -> None:
        self._in_step = None  # of a step that failed
        made = self._tracker.made, len(self._steps)
        if made != self._known:
            self._known = made
            self._look_for_parameters()
        for each in self._watched.values():
            each.hook(self._contained)

    def _step_begins(self, optimizer: Optimizer, _args: Any, _named: Any) -> None:
        if self._in_step is not None and self._in_step is not optimizer:
            return  # one inside another, as ZeroRedundancyOptimizer has: the outer one counts
        number = self._steps.get(optimizer, 0) + 1
        self._steps[optimizer] = number
        if self._over or number > self._until:
            return
        self._in_step = optimizer
        # The optimizer's own hooks run behind this one, and may average gradients: the gradient is
        # read in one of these, which comes last.
        use = self._contained(lambda *_call: self._uses(optimizer, number))
        self._handles.append(optimizer.register_step_pre_hook(use))

    def _uses(self, optimizer: Optimizer, number: int) -> None:
        held = [each for each in _held_by(optimizer) if each[1].requires_grad]
        if any(id(tensor) not in self._watched for _, tensor, _ in held):
            self._look_for_parameters()
        for name, tensor, group in held:
            self._watch(name, tensor)
            if each := self._watched.get(id(tensor)):
                each.held_by(optimizer, number, group.get("lr"))
        for each in self._watched.values():
            if each.holder is None or each.holder() is optimizer:
                each.read_before()

    def _step_ends(self, optimizer: Optimizer, args: Any, named: Any) -> None:
        if self._over or self._in_step is not optimizer:
            return
        self._in_step = None
        self._handles.pop().remove()
        # With a closure the gradients are computed within the step.
        closure = len(args) > 1 or named.get("closure") is not None
        for each in self._watched.values():
            if each.holder is None or each.holder() is optimizer:
                each.stepped(again=closure)

    # -- what is there ---------------------------------------------------------------------

    def _look_for_parameters(self) -> None:
        spaces = self._held.spaces()
        models = [
            (root, found)
            for root in roots()
            if (found := [e for e in parameters_of(root) if e[1].requires_grad])
        ]
        flat = fsdp_private.flat(root for root, _ in models)
        if flat:
            self._notes["FSDP1 (FullyShardedDataParallel) is not looked into: use FSDP2"] = None
        for root, found in models:
            model = self._held.name_of(root, spaces)
            is_wrapper = isinstance(root, DistributedDataParallel)
            for name, tensor, unit in found:
                if id(tensor) not in flat:
                    inside = name.removeprefix("module.") if is_wrapper else name
                    self._watch(f"{model}.{inside}", tensor, unit and unit.param)
        for optimizer in objects_of(Optimizer):
            for _, tensor, _ in _held_by(optimizer):
                if (each := self._watched.get(id(tensor))) and each.holder is None:
                    each.held_by(optimizer, 0, None)

    def _watch(self, name: str, tensor: torch.Tensor, unit: Any = None) -> None:
        known = self._watched.get(id(tensor))
        if known is not None and known.tensor() is tensor:
            return
        if len(self._watched) >= _MOST_PARAMETERS:
            self._notes[f"only the first {_MOST_PARAMETERS} parameters were looked at"] = None
            return
        if tensor.is_complex() or not tensor.is_leaf or torch.nn.parameter.is_lazy(tensor):
            self._notes[f"{name} could not be read"] = None
            return
        replica = next((r for r in self._tracker.replicas.values() if r.knows(tensor)), None)
        within, group = ("DDP", tuple(replica.group)) if replica is not None else ("", ())
        placements, *_, mesh = fsdp_private.spec(tensor)
        if placements:
            within, group = "FSDP2" if unit is not None else "DTensor", mesh
        sharded = any(placement.startswith("Shard") for placement in placements)
        taken = {each.name for each in self._watched.values()}
        if name in taken:  # by one that was replaced since, or of another model without a variable
            name = next(new for at in count(2) if (new := f"{name} ({at})") not in taken)
        facts = SteppedParameter(name, tuple(tensor.shape), within, group, sharded)
        self._watched[id(tensor)] = _Watched(tensor, facts, unit)


def _held_by(optimizer: Optimizer) -> Iterable[tuple[str, torch.Tensor, Any]]:
    for group in optimizer.param_groups:
        for name, tensor in digests.named([group]):
            yield name, tensor, group


class _Watched:
    """One parameter while it is looked at; the hook on it keeps nothing alive."""

    def __init__(self, tensor: torch.Tensor, known: SteppedParameter, unit: Any) -> None:
        self.tensor = weakref.ref(tensor)
        self.holder: weakref.ref[Optimizer] | None = None
        """The optimizer that has it."""
        self.handle: Any = None
        self.own: Sample | None = None
        self.shown: SteppedParameter | None = None
        """What is reported: its last step."""
        self._known = known
        self._unit = unit
        self._hooked: Any = None
        self._backwards = self._earlier = 0

    @property
    def name(self) -> str:
        """Its name in the ledger."""
        return self._known.name

    def hook(self, contained: Any) -> None:
        """Put a hook where its gradients arrive, unless there is one."""
        tensor: Any = self.tensor()
        if self._unit is not None:
            tensor = fsdp_private.gathered(self._unit)
        if tensor is None or (self._hooked is not None and self._hooked() is tensor):
            return
        self._hooked = weakref.ref(tensor)
        self.handle = tensor.register_hook(contained(self._arrives))
        # Ahead of hooks of the user's own, which may average.
        with contextlib.suppress(AttributeError, KeyError):
            tensor._backward_hooks.move_to_end(self.handle.id, last=False)

    def _arrives(self, gradient: torch.Tensor) -> None:
        """A backward brings its gradient; nothing has reduced or added it yet."""
        tensor: Any = self.tensor()
        values = _sample(gradient.detach())
        unreduced = self._unit is not None and fsdp_private.is_unreduced(self._unit)
        kept = tensor.grad if tensor is not None else None
        if not unreduced and (kept is None or not _local(kept).any()):
            self._earlier = self._backwards = 0
            self.own = None
        if self.own is not None:
            both = zip(self.own, values, strict=True)
            values = tuple(None if a is None or b is None else a + b for a, b in both)
        self.own = values
        self._backwards += 1

    def held_by(self, optimizer: Optimizer, number: int, lr: Any) -> None:
        """An optimizer has it, and is about to make this step; 0 for none yet."""
        self.holder = weakref.ref(optimizer)
        rate = float(lr) if lr is not None else None
        kind = type(optimizer).__name__
        self._known = replace(self._known, optimizer=kind, steps=number, lr=rate)

    def read_before(self) -> None:
        """Read it, and the gradient that is about to be used."""
        tensor: Any = self.tensor()
        if tensor is not None:
            self._known = replace(self._known, before=_read(tensor), after=None)
            self._read_gradient(tensor)

    def _read_gradient(self, tensor: Any) -> None:
        gradient = tensor.grad if self.holder is not None else None
        used = read = None
        if gradient is not None:
            read = _read(gradient)
            used = tuple(v if v is None else digests.short(v) for v in _sample(gradient))
        kept = self._unit is not None and fsdp_private.is_unreduced(self._unit)
        self._known = replace(self._known, used=used, read=read, unreduced=kept)

    def stepped(self, *, again: bool) -> None:
        """The optimizer has made the step; `again`: its gradient is to be read again."""
        tensor: Any = self.tensor()
        if tensor is None:
            return
        if again:
            self._read_gradient(tensor)
        self._known = replace(self._known, after=_read(tensor))
        self.shown = self.facts()
        self._earlier, self._backwards = self._earlier + self._backwards, 0

    def facts(self) -> SteppedParameter:
        """What is known of it now."""
        own = self.own if self._backwards or self._known.used is not None else None
        short = own and tuple(None if value is None else digests.short(value) for value in own)
        earlier = self._earlier if own is not None else 0
        return replace(self._known, own=short, backwards=self._backwards, earlier=earlier)


# -- tensors in a few values -------------------------------------------------------------


@cache
def _places(shape: tuple[int, ...]) -> torch.Tensor:
    """The indices of the values that are sampled, by dimension: the same on all ranks."""
    numel = math.prod(shape)
    flat = range(numel)
    if numel > _MOST_VALUES:
        # Not in even steps: those might all fall into one column of a matrix.
        golden = (math.sqrt(5) - 1) / 2
        flat = sorted({int(numel * (i * golden % 1)) for i in range(_MOST_VALUES)})  # type: ignore[assignment]
    return torch.stack(torch.unravel_index(torch.tensor(list(flat), dtype=torch.long), shape))


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor).detach()
    return local if local.layout is torch.strided else local.to_dense()


def _sample(tensor: Any) -> Sample:
    """A few values of the whole tensor; None for those that other ranks have."""
    local, shape = _local(tensor), tuple(tensor.shape)
    if not shape:
        return (float(local),)
    offset, size = fsdp_private.offset_of(tensor), torch.tensor(local.shape)
    places = _places(shape) - torch.tensor(offset or (0,) * len(shape))[:, None]
    here = ((places >= 0) & (places < size[:, None])).all(0)
    values = iter(local[tuple(places[:, here])].double().tolist())
    return tuple(next(values) if is_here else None for is_here in here.tolist())


def _read(tensor: Any) -> Reading:
    local = _local(tensor)
    total = float(local.sum(dtype=torch.float64))
    size = float(torch.linalg.vector_norm(local, 1, dtype=torch.float64))
    return Reading(f"{zlib.crc32(repr(_sample(tensor)).encode()):08x}", total, size)
