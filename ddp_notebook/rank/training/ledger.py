"""Records one training step: the gradients of its backwards, and those that its optimizers used.

Loaded and installed only for a run that is asked for a ledger, and gone when that is over. Nothing
here communicates: the ranks' records are compared in the notebook. Each step replaces the one
before, until the one that was asked for.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optim

from ddp_notebook.model import RankLedger, SteppedParameter, TensorDigest
from ddp_notebook.rank import gpu
from ddp_notebook.rank.component import Run
from ddp_notebook.rank.inspect.frames import raised_by_handler
from ddp_notebook.rank.training import digests, fsdp_private
from ddp_notebook.rank.training.facts import as_number
from ddp_notebook.rank.training.held import Held, parameters_of, roots, variable_of
from ddp_notebook.rank.training.patching import Patches
from ddp_notebook.rank.training.tracker import Tracker

_MOST_PARAMETERS = 2000
_MOST_VALUES = 32
"""So many values of a gradient are sampled."""
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


class StepLedger:
    """Records the training steps of a run up to the one asked for; `report` has the last one."""

    def __init__(self, tracker: Tracker, held: Held, rank: int, run: Run) -> None:
        self.report = RankLedger(rank, run.number)
        self._tracker, self._held, self._until = tracker, held, run.ledger
        self._watched: dict[int, _Watched] = {}
        self._models: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """The number of steps of each optimizer."""
        self._in_step: Any = None
        """The optimizer that is making a step."""
        self._flat: dict[int, Any] = {}
        """Parameters of FSDP1."""
        self._seen: object = None
        """How many DDP objects and optimizers there were when parameters were looked for."""
        self._notes: set[str] = set()
        self._over = False
        patches = Patches(lambda: self._over or torch.compiler.is_compiling(), self._failed)
        self._contained = patches.contained
        # Gradients are met by hooks on the parameters. They are put there as a backward begins:
        # only then has FSDP2 made the tensors whose gradients it will reduce.
        self._torchs = torch.autograd.backward
        patches.patch(torch.autograd, "backward", lambda *_call: self._backward_begins())
        self._patched = torch.autograd.backward
        self._handles = [
            optim.register_optimizer_step_pre_hook(self._contained(self._step_begins)),
            optim.register_optimizer_step_post_hook(self._contained(self._step_ends)),
        ]

    def end(self) -> None:
        """Remove all hooks, as the run is over, and make the report."""
        self._over = True
        if torch.autograd.backward is self._patched:  # else another has replaced it since
            torch.autograd.backward = self._torchs
        watched = list(self._watched.values())
        for handle in (*self._handles, *(each.handle for each in watched if each.handle)):
            handle.remove()
        # A model none of whose parameters is trained is a copy, a teacher, another rank's stage.
        trained = {each.model for each in watched if each.now.own is not None or each.now.steps}
        shown = tuple(each.shown or each.now for each in watched if each.model in trained)
        self.report = replace(self.report, parameters=shown, notes=tuple(sorted(self._notes)))

    def _failed(self, error: Exception) -> None:
        if raised_by_handler(error):
            raise error
        self._over = True
        self._notes.add(f"recording ended early: {type(error).__name__}: {error}")

    def _backward_begins(self) -> None:
        seen = self._tracker.made, len(self._steps)
        if seen != self._seen:
            self._seen = seen
            self._look_for_parameters()
        for each in self._watched.values():
            each.hook(self._contained)

    def _step_begins(self, optimizer: Any, _args: Any, _named: Any) -> None:
        if self._in_step is not None and self._in_step is not optimizer:
            return  # one inside another, as ZeroRedundancyOptimizer has: the outer one counts
        self._steps[optimizer] = number = self._steps.get(optimizer, 0) + 1
        if number > self._until or self._over:
            return
        self._in_step, held = optimizer, digests.named(optimizer.param_groups)
        if any(id(tensor) not in self._watched for _, tensor in held):
            self._look_for_parameters()
        for name, tensor in held:
            self._watch(type(optimizer).__name__, name, tensor)
        for each in self._watched.values():
            each.now.before = _digest(each.tensor())

    def _step_ends(self, optimizer: Any, _args: Any, _named: Any) -> None:
        if self._over or self._in_step is not optimizer:
            return
        self._in_step = None
        # Gradients are read only now: the optimizer's own hooks may have averaged them before its
        # step, and a closure computes them within it.
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                if each := self._watched.get(id(tensor)):
                    each.now.optimizer = type(optimizer).__name__
                    each.now.lr = as_number(group.get("lr"))
                    each.stepped(self._steps[optimizer])
        for each in self._watched.values():
            if not each.now.steps:
                each.stepped(0)

    def _look_for_parameters(self) -> None:
        spaces, models = self._held.spaces(), roots()
        self._flat = fsdp_private.flat(models)
        if self._flat:
            self._notes.add("FSDP1 (FullyShardedDataParallel) is not looked into")
        for root in models:
            if (model := self._models.get(root, "")) == "":
                model = variable_of(root, spaces) or type(root).__name__
                model += "'" * [*self._models.values()].count(model)
                self._models[root] = model
            wrapper = "module." if isinstance(root, DistributedDataParallel) else ""
            for name, tensor, unit in parameters_of(root):
                self._watch(model, name.removeprefix(wrapper), tensor, unit and unit.param)

    def _watch(self, model: str, name: str, tensor: torch.Tensor, param: Any = None) -> None:
        known = self._watched.get(id(tensor))
        if known is not None and known.tensor() is not tensor:
            # It is gone, and keeps its record under a number that no object has.
            self._watched[-len(self._watched) - 1] = self._watched.pop(id(tensor))
        if tensor.requires_grad and not {id(tensor)} & {*self._watched, *self._flat}:
            self._watch_new(model, name, tensor, param)

    def _watch_new(self, model: str, name: str, tensor: torch.Tensor, param: Any) -> None:
        cannot_be_read = tensor.is_complex() | tensor.is_meta | torch.nn.parameter.is_lazy(tensor)
        if cannot_be_read or len(self._watched) >= _MOST_PARAMETERS:
            most = f"{_MOST_PARAMETERS:,}"
            self._notes.add(f"left out: complex parameters, those without values, or beyond {most}")
            return
        now = SteppedParameter(f"{model}.{name}", tuple(tensor.shape))
        for replica in self._tracker.replicas.values():
            if replica.knows(tensor):
                now.within, now.group = "DDP", tuple(replica.group)
        if (spec := fsdp_private.spec(tensor))[0]:
            now.within, now.group = ("DTensor", "FSDP2")[param is not None], spec[-1]
            now.sharded = "Shard" in str(spec[0])
        self._watched[id(tensor)] = _Watched(weakref.ref(tensor), model, now, param)


@dataclass(eq=False)
class _Watched:
    """A parameter while it is looked at, which is not kept alive. `param` is FSDP2's own of it."""

    tensor: Callable[[], Any]
    model: str
    now: SteppedParameter
    param: Any
    shown: SteppedParameter | None = None
    """Its record of the last step."""
    handle: Any = None

    def hook(self, contained: Callable[..., Any]) -> None:
        """Put a hook where its gradients arrive, unless there is one."""
        tensor: Any = self.tensor() if self.param is None else fsdp_private.gathered(self.param)
        if tensor is None or self.handle is not None:
            return
        self.handle = tensor.register_hook(contained(self.arrives))
        # Ahead of hooks of the user's own, which may average: those are put in again behind it.
        hooks = getattr(tensor, "_backward_hooks", None) or {}
        for other in [number for number in hooks if number != self.handle.id]:
            hooks[other] = hooks.pop(other)

    def arrives(self, gradient: torch.Tensor) -> None:
        """Record a gradient of a backward, which nothing has reduced or added to another yet."""
        now, kept, values = self.now, getattr(self.tensor(), "grad", None), _sample(gradient)
        if not fsdp_private.is_unreduced(self.param) and (kept is None or not _local(kept).any()):
            now.own, now.backwards, now.earlier = None, 0, 0
        both = zip(now.own or (0.0,) * len(values), values, strict=True)
        now.own = tuple(None if a is None or b is None else a + b for a, b in both)
        now.backwards += 1

    def stepped(self, number: int) -> None:
        """Record the step that its optimizer has made; 0: another made one, and none has this."""
        now, tensor = self.now, self.tensor()
        gradient = getattr(tensor, "grad", None) if number else None
        now.steps, now.after, now.used_digest = number, _digest(tensor), _digest(gradient)
        now.used = None if gradient is None else _sample(gradient)
        if number and gradient is None and not now.backwards:
            now.own = None
        self.shown = replace(now)
        if number:
            now.earlier, now.backwards = now.earlier + now.backwards, 0


def _local(tensor: Any) -> torch.Tensor:
    """This rank's part, on the host. Waits for the GPU that works on it, interruptible."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor).detach()
    if local.is_cuda:
        gpu.await_work(lambda _: None)
    return (local if local.layout is torch.strided else local.to_dense()).cpu()


def _digest(tensor: Any) -> TensorDigest | None:
    return None if tensor is None else digests.digest("", _local(tensor))


def _sample(tensor: Any) -> tuple[float | None, ...]:
    """Return a few values of the whole tensor; None for those that other ranks have."""
    local, start, numel = _local(tensor).reshape(-1), fsdp_private.start_of(tensor), tensor.numel()
    # Not in even steps: those might all be of one column of a matrix.
    places = sorted({int(numel * (_GOLDEN_RATIO * i % 1)) for i in range(_MOST_VALUES)})
    return tuple(
        digests.short(float(local[at - start])) if 0 <= at - start < local.numel() else None
        for at in places
    )
