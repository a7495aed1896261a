"""What this rank's DDP objects and optimizers do, counted as they do it.

A forward is through the wrapper or around it, under no_sync or not; the backward that follows
is then reduced or is not; and a training step uses what the last backward gave. Counting costs
some microseconds a training step, waits for no device, and keeps nothing of the user's alive.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook import model
from ddp_notebook.rank.collectives.call_sites import CallSites, Line
from ddp_notebook.rank.training.evaluations import Evaluation, Moments
from ddp_notebook.rank.training.gradients import Gradients, read_loss
from ddp_notebook.rank.training.parallel.plain import PlainModels
from ddp_notebook.rank.training.parallel.split import Split
from ddp_notebook.rank.training.samplers import is_made
from ddp_notebook.rank.training.tracked import Copy, Replica, TrackedOptimizer

_SMALL_BUCKET = 4096
"""In elements."""
_FIRST_BUCKETS, _EVERY_BUCKET = 4, 16
"""Of the small buckets of a backward, the first are looked at, and some of the others."""
_MOST = 32
"""DDP objects, and optimizers, that are kept track of at a time."""
_LOSSES, _MOST_COPIES, _MOST_METRICS = 8, 8, 32


class Tracker:
    """What this process has counted of its DDP objects and optimizers."""

    def __init__(self, call_sites: CallSites) -> None:
        self._call_sites = call_sites
        self.broken = ""
        """Why it disabled itself; empty while it works."""
        self.made = 0
        self.replicas: dict[int, Replica] = {}
        self.modules: dict[int, Replica] = {}
        self.copies: dict[int, Copy] = {}
        """Of the modules of DDP objects, in the order in which this run used them."""
        self.gone: list[Replica] = []
        """Objects of this run that were deleted, as they were then."""
        self.optimizers: dict[int, TrackedOptimizer] = {}
        self.backwards = 0
        self.fed = False
        """A DDP object got what another model made, since an optimizer stepped."""
        self.split = Split(call_sites)
        """Models that are split over ranks."""
        self.plain = PlainModels(call_sites)
        """Models that no DDP object contains."""
        self.evaluation: Evaluation | None = None
        """The forwards without gradients since the last backward."""
        self._small_buckets = 0
        """Of the backward that is under way."""
        self.nan_backward: int | None = None
        self.nan_what = ""
        self.nan_place: Line | None = None
        self.losses: list[model.LossFacts] = []
        """Of the first backwards of the run."""
        self.nan_losses = 0
        """How many of the last losses were not a number, one after the other."""
        self._nan_gradients = 0, -1
        """How many backwards, one after the other, left a gradient that is no number; the last."""
        self.skipped = 0
        """How often a GradScaler was to make a step since an optimizer made one."""
        self.skipped_place: Line | None = None

    def begin(self) -> None:
        """A cell or a script begins: forget deleted objects, and count the others anew."""
        self.replicas = {k: r for k, r in self.replicas.items() if r.ref() is not None}
        self.modules = {id(r.module()): r for r in self.replicas.values()}
        self.optimizers = {k: o for k, o in self.optimizers.items() if o.ref() is not None}
        self.gone.clear()
        self.copies.clear()
        for replica in self.replicas.values():
            replica.begin()
        for stepped in self.optimizers.values():
            stepped.begin()
        self.backwards, self.nan_backward, self.nan_what = 0, None, ""
        self.nan_place = self.evaluation = None
        self.losses.clear()
        self.nan_losses = self.skipped = 0
        self._nan_gradients = 0, -1
        self.skipped_place = None
        self.split.begin()
        self.plain.begin()

    def disable(self, error: BaseException) -> None:
        """Stop counting in this process."""
        self.broken = f"{type(error).__name__}: {error}"

    def replica(self, wrapped: DistributedDataParallel) -> Replica:
        """The record of a DDP object."""
        found = self.replicas.get(id(wrapped))
        if found is not None and found.ref() is wrapped:
            return found
        if found is not None:
            self._archive(found)
        self.made += 1
        if len(self.replicas) >= _MOST:
            self.replicas.pop(next(iter(self.replicas)))
        found = self.replicas[id(wrapped)] = Replica(wrapped, self.made, self._call_sites)
        self.modules[id(found.module())] = found
        return found

    def _archive(self, replica: Replica) -> None:
        self.replicas = {k: r for k, r in self.replicas.items() if r is not replica}
        known = replica.last_facts is not None if replica.used else replica.evaluated
        if known and len(self.gone) < _MOST:
            self.gone.append(replica)

    def died(self, wrapped: DistributedDataParallel, facts: Any) -> None:
        """A DDP object is about to be deleted; `facts` are kept in its place."""
        replica = self.replicas.get(id(wrapped))
        if replica is not None:
            replica.last_facts = facts
            self._archive(replica)

    def bypass(self, module: torch.nn.Module) -> None:
        """A forward of `module` begins; ignored unless a DDP object contains it."""
        replica = self.modules.get(id(module))
        if replica is not None and not replica.inside and replica.module() is module:
            wrapped = replica.ref()
            if wrapped is not None:
                replica.bypass()

    def has_inside(self, module: torch.nn.Module) -> bool:
        """True of the module inside a DDP object."""
        replica = self.modules.get(id(module))
        return replica is not None and replica.module() is module

    def copy_used(self, module: torch.nn.Module) -> None:
        """A forward begins of a copy of a DDP object's module, which nothing is trained by."""
        copy = self._copy(module)
        if copy is not None:
            copy.used(module, self.backwards)

    def copy_loads(self, module: torch.nn.Module) -> None:
        """`load_state_dict` of such a copy is called: what it then is may be each rank's own."""
        copy = self._copy(module)
        if copy is not None:
            copy.loads += 1

    def _copy(self, module: torch.nn.Module) -> Copy | None:
        copy = self.copies.get(id(module))
        if (copy is None or copy.ref() is None) and len(self.copies) < _MOST_COPIES:
            copy = self.copies[id(module)] = Copy(module, self._call_sites.users_line())
        return copy if copy is not None and copy.ref() is module else None

    def backward(self, loss: Any) -> None:
        """A backward of `loss` begins."""
        number = self.backwards
        self.backwards = number + 1
        if self.plain.judged:
            self.plain.train()
        self.evaluation = None
        self._small_buckets = 0
        for gradients in self._watched_gradients():
            gradients.backward_begins()
        for replica in self.replicas.values():
            replica.backward()
        for plain in self.plain.of:
            plain.moments.backward()
        # To read a value from a device would wait for it.
        known = isinstance(loss, torch.Tensor) and loss.is_cpu and loss.numel() == 1
        value = float(loss.item()) if known else None
        self.split.backward(number, value)
        if value is not None:
            self._look_at(loss, value, number)

    def _look_at(self, loss: torch.Tensor, value: float, number: int) -> None:
        if number < _LOSSES:
            with contextlib.suppress(AttributeError, RuntimeError, TypeError, IndexError):
                self.losses.append(read_loss(loss, self._call_sites.users_line()))
        # A loss that is scaled up may be infinite for once; that it is no number has another cause.
        self.nan_losses = self.nan_losses + 1 if math.isnan(value) else 0
        if self.nan_backward is None and not math.isfinite(value):
            self._is_bad(number, "the loss")

    def scaler_steps(self, _scaler: Any) -> None:
        """`GradScaler.step` is called: it makes the optimizer's step, or skips it."""
        self.skipped += 1
        self.skipped_place = self.skipped_place or self._call_sites.users_line()
        for gradients in self._watched_gradients():
            gradients.scaler_steps()

    def backward_over(self) -> None:
        """A backward has ended well."""
        for replica in self.replicas.values():
            if replica.hooked is not None:
                replica.hooked.backward_ends()
        for gradients in self._watched_gradients():
            gradients.backward_ends()

    def _watched_gradients(self) -> list[Gradients]:
        optimizers = self.optimizers.values()
        return [g for each in optimizers if (g := each.gradients) is not None and g.watched]

    def bucket(self, gradients: torch.Tensor) -> None:
        """A bucket of this rank's own gradients is about to be reduced."""
        size = gradients.numel()
        if size <= _SMALL_BUCKET:
            # To look at such a bucket would take as long as to send it.
            self._small_buckets = seen = self._small_buckets + 1
            if seen > _FIRST_BUCKETS and seen % _EVERY_BUCKET:
                return
        # Only of steps that a GradScaler skips it matters whether gradients get better.
        if (self.nan_backward is not None and not self.skipped) or not gradients.is_cpu:
            return
        probe = gradients if size <= _SMALL_BUCKET else gradients.view(-1)[:: size // 256]
        if not math.isfinite(probe.sum().item()) and not probe.isfinite().all():
            self._has_bad_gradient(max(0, self.backwards - 1), probe)

    def _has_bad_gradient(self, number: int, gradients: torch.Tensor) -> None:
        if self.nan_backward is None:
            self._is_bad(number, "a gradient")
        count, last = self._nan_gradients
        if last != number and gradients.isnan().any():
            self._nan_gradients = (count + 1 if last == number - 1 else 1), number

    @property
    def nan_gradients(self) -> int:
        """In how many of the last backwards, one after the other, a gradient was no number."""
        count, last = self._nan_gradients
        return count if last == self.backwards - 1 else 0

    def _is_bad(self, number: int, what: str) -> None:
        self.nan_backward, self.nan_what = number, what
        self.nan_place = self._call_sites.users_line()

    def feeds(self, replica: Replica, inputs: Any) -> None:
        """A DDP object gets `inputs`: what the data are, or what another model has made."""
        replica.fed = len(self.optimizers) > 1 and is_made(inputs)
        self.fed |= replica.fed

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to make a step."""
        self._optimizer(optimizer).step_begins(
            optimizer, self.split.flat, self.replicas, self.backwards
        )
        self.split.step_begins(optimizer)
        self.plain.step_begins(optimizer, self._modules)

    def moments(self) -> list[Moments]:
        """Those of all models, with DDP and without."""
        with_ddp = [replica.moments for replica in self.replicas.values()]
        return with_ddp + [plain.moments for plain in (*self.plain.of, *self.plain.judged)]

    @property
    def summed_up(self) -> bool:
        """True if ranks have joined what an evaluation came to."""
        moments = [*self.moments(), *(replica.moments for replica in self.gone)]
        return any(evaluation.joined for each in moments for evaluation in each.evaluations)

    def _modules(self) -> list[torch.nn.Module]:
        modules = [replica.module() for replica in self.replicas.values()]
        return [module for module in modules if module is not None]

    def module_loads(self, module: torch.nn.Module) -> None:
        """`load_state_dict` of a module is called: of a DDP object's part, or one to evaluate."""
        self.judged(module, loads=True)
        for replica in self.replicas.values():
            wrapped = replica.ref()
            if wrapped is not None and any(part is module for part in wrapped.modules()):
                replica.loads.add()

    def judged(self, module: torch.nn.Module, *, loads: bool = False) -> None:
        """A module without DDP is put in evaluation mode, or loaded, in a run that trains none."""
        if not (self.backwards or self.replicas):
            self.plain.judge(module, loads=loads)

    def optimizer_loads(self, optimizer: torch.optim.Optimizer) -> None:
        """`load_state_dict` of an optimizer is called."""
        self._optimizer(optimizer).loads.add()

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has made a step."""
        self.skipped = 0
        own = self._optimizer(optimizer)
        own.step(optimizer, self.replicas, self.made, self.optimizers)
        if self.fed:
            self.fed = False
            for other in self.optimizers.values():
                if other is not own:
                    other.other_steps()
        self.split.stepped(optimizer)

    def metric(self, optimizer: torch.optim.Optimizer, value: float) -> None:
        """ReduceLROnPlateau judges by this value whether the learning rate is to be lower."""
        metrics = self._optimizer(optimizer).metrics
        if len(metrics) < _MOST_METRICS:
            metrics.append(value)

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> TrackedOptimizer:
        found = self.optimizers.get(id(optimizer))
        if found is None or found.ref() is not optimizer:
            if len(self.optimizers) >= _MOST:
                self.optimizers.pop(next(iter(self.optimizers)))
            found = TrackedOptimizer(optimizer, len(self.optimizers), self._call_sites)
            self.optimizers[id(optimizer)] = found
        return found
