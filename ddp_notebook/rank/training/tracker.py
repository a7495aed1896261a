"""The steps of this rank's DDP objects and optimizers, counted as they are made.

A forward is through the wrapper or around it, under no_sync or not; the backward that follows
is then reduced or is not; and a training step uses what the last backward gave. Counting costs
some microseconds a training step, waits for no device, and keeps nothing of the user's alive.
"""

from __future__ import annotations

import contextlib
import math
import weakref
import zlib
from collections.abc import Callable, Container, Iterable, Mapping
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.model import Place, Ranks
from ddp_notebook.rank import gpu, torch_private
from ddp_notebook.rank.collectives.call_sites import CallSites
from ddp_notebook.rank.inspect.frames import raised_by_handler
from ddp_notebook.rank.inspect.objects import objects_of
from ddp_notebook.rank.training import ddp, digests, fsdp_private
from ddp_notebook.rank.training.inputs import Moments
from ddp_notebook.rank.training.split import Copies, Split

if TYPE_CHECKING:
    from ddp_notebook.model import TensorDigest

NONE, BYPASSED, LOCAL, REDUCED = range(4)
"""The ways of a backward's gradients, reduced or not; of several forwards the greatest counts."""
MOST_NAMES = 40
"""So many parameters are named in a report."""
_STEPS_TO_BE_IDLE = 3
"""A tensor without a gradient in so many steps counts as unused by any forward."""


# -- one DDP object --------------------------------------------------------------------


def _held_by(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return {id(parameter) for group in groups for parameter in group["params"]}


def _is_plain(parameter: torch.Tensor) -> bool:
    """True of a tensor that can be read: no shard, not on the meta device, its GPU not at work."""
    readable = not parameter.is_meta and type(parameter.data) is torch.Tensor
    return readable and parameter.is_contiguous() and gpu.is_readable(parameter)


def _some_values(parameter: torch.Tensor | None) -> tuple[float, ...]:
    """Sixteen values at most, evenly spread; empty if they cannot be read."""
    if parameter is None or not _is_plain(parameter):
        return ()
    return tuple(digests.spread(parameter.detach(), 16))


class _Loaded:
    """An object of the user's whose `load_state_dict` is counted."""

    def __init__(self, users_line: Callable[[], Place | None]) -> None:
        self._users_line = users_line
        self.loads = 0
        self.load_place: Place | None = None

    def add_load(self) -> None:
        """Count a call of `load_state_dict`."""
        self.loads += 1
        self.load_place = self.load_place or self._users_line()


class Replica(_Loaded):
    """One DistributedDataParallel object."""

    def __init__(
        self, wrapped: DistributedDataParallel, number: int, call_sites: CallSites
    ) -> None:
        super().__init__(call_sites.users_line)
        module = wrapped.module
        names, parameters, _ = ddp.reduced(module)
        self.ref = weakref.ref(wrapped)
        self.module = weakref.ref(module)
        self.number = number
        self.group = fsdp_private.members(wrapped.process_group)
        self.names = names
        self.known = {id(parameter): weakref.ref(parameter) for parameter in parameters}
        self.type = type(module).__name__
        made_of = [(name, tuple(each.shape)) for name, each in module.named_parameters()]
        self.made_of = f"{self.type} {zlib.crc32(repr(made_of).encode()):08x}"
        # Whether a model is frozen for the moment shows at either end of it.
        self.ends = tuple(
            weakref.ref(parameter) for parameter in (parameters[:1] + parameters[-1:])
        )
        self.moments = Moments(call_sites)
        self.place: Place | None = None
        """Where it was made."""
        # Parameters of one shape and equal values. By a few values first: to compare each pair of
        # tensors whole would take minutes. Constants (zeros of biases, ones of norms) are equal in
        # any model, and layers made by deepcopy, as those of an encoder or a teacher's beside a
        # student's, are equal under the same last names: neither count.
        by_values: dict[tuple[object, ...], list[tuple[str, torch.Tensor]]] = {}
        for name, parameter in islice(module.named_parameters(), 2000):
            values = _some_values(parameter) if parameter.dim() > 1 else ()
            if len(set(values)) > 1:
                alike = by_values.setdefault((tuple(parameter.shape), values), [])
                alike.append((name, parameter))
        twins = (
            (one, other)
            for alike in by_values.values()
            for (one, a), (other, b) in pairwise(alike)
            if one.split(".")[-2:] != other.split(".")[-2:] and torch.equal(a, b)
        )
        self.twins = tuple(islice(twins, 8))
        self.inside = 0
        """Its forward is running."""
        self.handle: Any = None
        """The handle of the hook by which a forward past the object is seen; None without one."""
        self.last_facts: Any = None
        """The last facts of an object that was deleted."""
        self.begin()

    def begin(self) -> None:
        """Forget the last run."""
        self.moments.begin()
        self.pending = self.last = NONE
        self.tells_all = True
        """Each forward gave one tensor, and a backward came before the next."""
        self.forwards = self.no_sync_forwards = self.bypasses = self.backwards = 0
        self.steps = self.local_steps = self.bypassed_steps = self.unready_steps = 0
        self.bypass_place: Place | None = None
        self.bad_place: Place | None = None
        self.local_place: Place | None = None
        self.unready: tuple[str, ...] = ()
        self._all_buckets = 0
        self._unheld: list[tuple[str, weakref.ref[torch.Tensor], tuple[float, ...]]] = []
        self.loads, self.load_place = 0, None

    def take_out(self) -> None:
        """Remove the hook: torch compiles a module of its own that has one, and else does not."""
        if self.handle is not None:
            self.handle.remove()
            self.handle = None

    @property
    def used(self) -> bool:
        """True if this run used it to train."""
        return bool(self.forwards or self.bypasses or self.steps)

    @property
    def could_find_unused(self) -> bool:
        """True if DDP sees in a forward which of the module's parameters a backward will reach."""
        module = self.module()
        with contextlib.suppress(RuntimeError):  # it may be changed meanwhile, on another thread
            trained = (p for p in module.parameters() if p.requires_grad) if module else ()
            return self.tells_all and all(map(self.knows, trained))
        return False

    def trains(self) -> bool:
        """False while its parameters are frozen."""
        ends = [ref() for ref in self.ends]
        return any(parameter is not None and parameter.requires_grad for parameter in ends)

    def knows(self, parameter: torch.Tensor) -> bool:
        """True of a parameter on which its reducer has a hook."""
        ref = self.known.get(id(parameter))
        return ref is not None and ref() is parameter

    def enter(self, reduces: bool) -> None:
        """A forward through the wrapper begins, whose backward reduces gradients or does not."""
        self.inside += 1
        self.forwards += 1
        self.tells_all &= not self.pending
        # Several forwards may precede a backward. One of them that reduces has the reducer's hooks
        # run for all gradients of it, so it decides; `pending` is handed on when that begins.
        if reduces:
            self.pending = REDUCED
        else:
            self.no_sync_forwards += 1
            if self.pending < LOCAL and self.trains():
                self.pending = LOCAL
            self.local_place = self.local_place or self._users_line()

    def bypass(self) -> None:
        """A forward of the module inside begins, without the wrapper."""
        if not self.trains():
            return
        self.bypasses += 1
        self.bypass_place = self.bypass_place or self._users_line()
        self.pending = self.pending or BYPASSED

    def backward(self) -> None:
        """A backward begins."""
        if self.moments.evaluating is not None:
            self.moments.backward()
        if self.pending:
            self.last, self.pending = self.pending, NONE
            self.backwards += 1

    def look_for_unheld(self, held: Container[int]) -> None:
        """Record which parameters get gradients, though no optimizer has them.

        Only a few, behind others that one has: what is in front may be a part that is not trained.
        """
        module = self.module()
        named = module.named_parameters() if module is not None else ()
        trained = [(name, each) for name, each in named if each.grad is not None]
        lacking = [(name, each) for name, each in trained if id(each) not in held]
        sizes = [sum(each.numel() for _, each in some) for some in (lacking, trained)]
        few = 2 * len(lacking) < len(trained) and 2 * sizes[0] < sizes[1]
        if not few or not lacking or lacking[0][0] == trained[0][0]:
            return
        # An optimizer that makes no step now, and will, is in no table yet.
        later = _held_by(objects_of(torch.optim.Optimizer))
        # Their values are kept: what another code path updates by hand is held by no optimizer.
        self._unheld = [
            (name, weakref.ref(each), _some_values(each))
            for name, each in lacking
            if id(each) not in later and any(_some_values(each.grad))
        ]

    @property
    def unheld(self) -> tuple[str, ...]:
        """The recorded parameters that have not changed since."""
        known = ((name, ref(), values) for name, ref, values in self._unheld)
        same = (n for n, each, values in known if each is not None and _some_values(each) == values)
        return tuple(same)[:MOST_NAMES]

    def step(self, buckets: int) -> None:
        """An optimizer has updated its parameters, after a backward with so many buckets."""
        self.steps += 1
        if self.last == REDUCED:
            # A bucket is sent once all of its parameters have gradients: as many as in a backward
            # after which none was lacking, and again none is. To ask the reducer itself releases
            # Python's lock, which other threads then keep for a while.
            if buckets and buckets == self._all_buckets:
                return
            wrapped = self.ref()
            places_left = ddp.unready(wrapped) if wrapped is not None else []
            if not places_left:
                self._all_buckets = buckets
                return
            self.unready_steps += 1
            self.unready = tuple(self.names[i] for i in places_left if i < len(self.names))
            self.unready = self.unready[:MOST_NAMES]
        elif self.last == LOCAL:
            self.local_steps += 1
        elif self.last == BYPASSED:
            self.bypassed_steps += 1
        else:
            return
        self.bad_place = self.bad_place or self._users_line()


# -- one optimizer ---------------------------------------------------------------------


class Gradients:
    """By which factors an optimizer's gradients are multiplied, in the first steps of a run.

    A few values of a few gradients are read after the backward, before the next one of the same
    step, and before the step. Each such value costs a copy, so that later steps are not looked at.
    """

    def __init__(self, groups: Iterable[Any], flat: Mapping[int, Ranks]) -> None:
        parameters = [tensor for _, tensor in digests.named(groups)]
        self.mesh, sharded = fsdp_private.sharded_in(parameters, flat)
        some = sharded or parameters
        # Six, evenly spread; by an odd number, since every second one may be a bias.
        some = some[:: max(1, len(some) // 6) | 1][:6]
        self._some = [weakref.ref(each) for each in some]
        self._pending = (
            fsdp_private.Pending({id(tensor) for tensor in parameters}) if self.mesh else None
        )
        self.begin()

    def begin(self) -> None:
        """Forget the last run."""
        self.factors: list[float | None] = []
        self.between: list[float | None] = []
        """The factors of a backward's gradients before the next one of the same step."""
        self.pending_steps = 0
        self.watched = True
        """While this run has few steps."""
        self._after_backward: list[list[float]] = []

    def backward_begins(self) -> None:
        """Record by what the gradients were multiplied that the last backward left, if any."""
        if self._after_backward and len(self.between) < 32:
            self.between.append(_factor(self._after_backward, self._values()))

    def backward_ends(self) -> None:
        """Sample the gradients that the backward has computed and reduced."""
        self._after_backward = self._values()

    def step_begins(self) -> bool:
        """Record their factor since the backward; True if other gradients are not reduced yet."""
        if self.watched:
            self.factors.append(_factor(self._after_backward, self._values()))
            self._after_backward = []
            self.watched = len(self.factors) < 8
        # The rest is a step's usual way: what is read there costs each step of a long training.
        if self._pending is None:
            return False
        pending = bool(self._pending)
        self.pending_steps += pending
        return pending

    def _values(self) -> list[list[float]]:
        """Of each gradient eight values at most; none if it cannot be read without waiting."""
        values: list[list[float]] = []
        for ref in self._some:
            gradient = parameter.grad if (parameter := ref()) is not None else None
            local = fsdp_private.local_part(gradient) if gradient is not None else None
            values.append([])
            if local is not None and local.layout is torch.strided and local.is_contiguous():
                values[-1] = digests.spread(local, 8)
        return values


def _factor(before: list[list[float]], after: list[list[float]]) -> float | None:
    """The factor by which all values were multiplied; None if it is not the same for all."""
    ratios = [
        b / a
        for one, other in zip(before, after, strict=False)
        if len(one) == len(other)
        for a, b in zip(one, other, strict=True)
        if a
    ]
    if len(ratios) < 4:  # fewer may agree by chance
        return None
    low, high = min(ratios), max(ratios)
    alike = high - low <= 1e-4 * max(abs(low), abs(high))  # False for what is not a number
    return float(f"{sum(ratios) / len(ratios):.6g}") if alike else None


class TrackedOptimizer(_Loaded):
    """One optimizer, from its first step on; `tracker` has the models that there are."""

    def __init__(self, optimizer: torch.optim.Optimizer, tracker: Tracker) -> None:
        super().__init__(tracker.call_sites.users_line)
        self._tracker = tracker
        self.ref = weakref.ref(optimizer)
        self.type = type(optimizer).__name__
        self.shape: Any = None
        self.made_of = ""
        """A hash of the shapes of its parameters."""
        self.numels: tuple[int, ...] = ()
        self.on_device = False
        """Some of its parameters are not in the host's memory."""
        self.replicas: list[Replica] = []
        self.unwrapped: list[tuple[str, weakref.ref[torch.Tensor]]] = []
        self.unmanaged: list[weakref.ref[torch.Tensor]] = []
        """Parameters of its models on which no reducer has a hook."""
        self.unmanaged_trained = False
        """It has made a step with gradients of some of these."""
        self.gradients: Gradients | None = None
        self.begins: tuple[TensorDigest, ...] = ()
        """Digests, before the first step, of parameters without a DDP object."""
        self.idle: list[weakref.ref[torch.Tensor]] = []
        """Tensors outside all DDP objects that had no gradient in the steps that were looked at."""
        self._looks = 0
        self._left_gradients: dict[int, tuple[float, ...]] = {}
        """Of these, by the ids of the references: what was left when another model took over."""
        self.last_digests: Any = None
        """Digests of its tensors when its model was deleted."""
        self.begin()

    def begin(self) -> None:
        """Forget the last run."""
        self.steps = self.idle_steps = 0
        self.lrs: tuple[Any, ...] = ()
        self.metrics: list[float] = []
        """The first values that ReduceLROnPlateau was given."""
        self.options: tuple[str, ...] = ()
        self.place: Place | None = None
        self.pending_place: Place | None = None
        self.unheld: tuple[str, ...] = ()
        """Parameters of its models that get gradients, and that no optimizer holds in their place.
        """
        self._begin_looks()
        self.loads, self.load_place = 0, None
        self.copies: Copies | None = None
        """The parameters that other ranks of a split model have too, from the first step on."""
        if self.gradients is not None:
            self.gradients.begin()

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is about to make a step."""
        groups, split = optimizer.param_groups, self._tracker.split
        # Nearly always the first parameter has a gradient, and ends the search.
        self.idle_steps += all(p.grad is None for group in groups for p in group["params"])
        if self.gradients is None:
            if self.shape is None:
                self._begin_with(groups)
            self.gradients = Gradients(groups, split.flat())
        if self.gradients.step_begins():
            self.pending_place = self.pending_place or self._users_line()
        if self.copies is None:
            self.copies = split.copies_of(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, buckets: int) -> None:
        """The optimizer has made a step.

        `buckets` are those of the last backward, 0 where they may be of several DDP objects.
        """
        # Which models it updates is looked up again only when its groups, or the DDP objects that
        # there are, have changed: add_param_group, a model that is wrapped after the first steps.
        groups = optimizer.param_groups
        shape = (self._tracker.made, len(groups), sum([len(group["params"]) for group in groups]))
        if shape != self.shape:
            if self.shape is not None and shape[1:] != self.shape[1:]:
                self.gradients = None
            self.shape = shape
            self._find_models(groups)
        if self.unmanaged and not self.unmanaged_trained:
            few = [ref() for ref in self.unmanaged[:: max(1, len(self.unmanaged) // 7)]]
            self.unmanaged_trained = any(p is not None and p.grad is not None for p in few)
        if not self.steps:
            self.place = self._users_line()
            self.options = tuple(
                f"{name}={value:g}"
                for group in groups[:8]
                for name, value in sorted(group.items())
                if isinstance(value, int | float) and "lr" not in name
            )
        self.steps += 1
        self.lrs = tuple([group.get("lr") for group in groups])
        if self.copies is not None and self.copies.split:
            self.copies.stepped()
        if not self.replicas:
            return
        if self._looks < _STEPS_TO_BE_IDLE:
            self._look_for_idle()
        # Within a backward the reducer is not done yet, and the step is one of many.
        if not torch_private.in_backward():
            for replica in self.replicas:
                replica.step(buckets)

    def _look_for_idle(self) -> None:
        """Which tensors no forward uses; after a few steps, which parameters no optimizer has."""
        self._looks += 1
        idle = []
        for ref in self.idle:
            parameter = ref()
            if parameter is not None and (
                parameter.grad is None
                or self._left_gradients.get(id(ref)) == _some_values(parameter.grad)
            ):
                idle.append(ref)
        self.idle = idle
        if self._looks == _STEPS_TO_BE_IDLE:
            held = set().union(*(each.holds() for each in self._tracker.optimizers.values()))
            self.unheld = self._held_by_none(held)[:MOST_NAMES]
            for replica in self.replicas:
                replica.look_for_unheld(held)

    def _begin_with(self, groups: Any) -> None:
        models = list(self._tracker.replicas.values())
        without = [(n, p) for n, p in digests.named(groups) if not any(r.knows(p) for r in models)]
        # Shards have methods that communicate, and are compared elsewhere.
        plain = [(name, tensor) for name, tensor in without if _is_plain(tensor) and tensor.is_cpu]
        made = (digests.digest(n, each.detach().view(-1)[: 2**14]) for n, each in plain[:100])
        self.begins = tuple(digest for digest in made if digest)

    def _find_models(self, groups: Any) -> None:
        parameters = {id(parameter): (name, parameter) for name, parameter in digests.named(groups)}
        tensors = [parameter for _, parameter in parameters.values()]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        self.numels = tuple(sorted(tensor.numel() for tensor in tensors))
        self.made_of = f"{self.type} {zlib.crc32(repr(shapes).encode()):08x}"
        self.on_device = any(not tensor.is_cpu for tensor in tensors)
        self.replicas = []
        self.unmanaged, self.unmanaged_trained = [], False
        # Of a model that was wrapped again, the first object may not be gone yet.
        newest = {id(each.module()): each for each in self._tracker.replicas.values()}
        for replica in newest.values():
            module = replica.module()
            if module is None or replica.ref() is None:
                continue
            inside = [each for each in module.parameters() if parameters.pop(id(each), None)]
            if inside:
                self.replicas.append(replica)
                self.unmanaged += [weakref.ref(p) for p in inside if not replica.knows(p)]
        self.unwrapped = [
            (name, weakref.ref(tensor))
            for name, tensor in parameters.values()
            if self.replicas and tensor.requires_grad
        ]
        self._begin_looks()

    def _begin_looks(self) -> None:
        # A gradient that is there already, and stays as it is, was left by a backward of another
        # model: a generator's backward fills gradients of the discriminator too. So what there is
        # when another look begins is remembered, and does not count as a gradient of these steps.
        self._looks = 0
        self.idle = [ref for _, ref in self.unwrapped]
        found = ((id(ref), ref()) for ref in (self.idle if self.steps else ()))
        left = ((number, _some_values(each.grad)) for number, each in found if each is not None)
        self._left_gradients = {number: values for number, values in left if values}

    def holds(self) -> set[int]:
        """The ids of the optimizer's parameters."""
        optimizer = self.ref()
        return _held_by([optimizer] if optimizer is not None else [])

    def _held_by_none(self, held: Container[int]) -> tuple[str, ...]:
        """Parameters with a gradient that no optimizer holds, alike in dimensions to idle ones.

        A layer that was replaced after the optimizer was made leaves just that.
        """
        if not self.idle:
            return ()
        lacking = [
            (name, each.dim())
            for replica in self.replicas
            if (module := replica.module()) is not None
            for name, each in module.named_parameters()
            if id(each) not in held and each.grad is not None
        ]
        idle = [each.dim() for ref in self.idle if (each := ref()) is not None]
        alike = sorted(idle) == sorted(dimensions for _, dimensions in lacking)
        return tuple(name for name, _ in lacking) if alike else ()


# -- all of them -----------------------------------------------------------------------


_MOST = 32
"""DDP objects, and optimizers, that are kept track of at a time."""


class Tracker:
    """The counts of this process's DDP objects and optimizers."""

    def __init__(self, call_sites: CallSites) -> None:
        self.call_sites = call_sites
        self.broken = ""
        """Why it disabled itself; empty while it works."""
        self.made = 0
        self.replicas: dict[int, Replica] = {}
        self.modules: dict[int, Replica] = {}
        self.gone: list[Replica] = []
        """Objects of this run that were deleted, as they were then."""
        self.optimizers: dict[int, TrackedOptimizer] = {}
        self._watched: list[Gradients] = []
        """The gradients of optimizers that have made few steps, while a backward is under way."""
        self.split = Split(call_sites)
        """Models that are split over ranks."""
        self._buckets = self._small_buckets = 0
        """The buckets of the last backward, or of the one under way."""
        self.begin()

    def begin(self) -> None:
        """A cell or a script begins: forget deleted objects, and count the others again."""
        self.replicas = {k: r for k, r in self.replicas.items() if r.ref() is not None}
        self.modules = {id(r.module()): r for r in self.replicas.values()}
        self.optimizers = {k: o for k, o in self.optimizers.items() if o.ref() is not None}
        self.gone.clear()
        for replica in self.replicas.values():
            replica.begin()
        for stepped in self.optimizers.values():
            stepped.begin()
        self.backwards = 0
        self.nan_backward: int | None = None
        self.nan_what = ""
        self.nan_place: Place | None = None
        self.split.begin()

    def disable(self, error: BaseException) -> None:
        """Stop counting in this process. Raises `error` if a handler of a signal raised it."""
        if raised_by_handler(error):
            raise error
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
        found = self.replicas[id(wrapped)] = Replica(wrapped, self.made, self.call_sites)
        self.modules = {id(r.module()): r for r in self.replicas.values()}
        return found

    def _archive(self, replica: Replica) -> None:
        self.replicas = {k: r for k, r in self.replicas.items() if r is not replica}
        if replica.used and replica.last_facts is not None and len(self.gone) < _MOST:
            self.gone.append(replica)

    def died(self, wrapped: DistributedDataParallel, facts: Any) -> None:
        """A DDP object is about to be deleted; `facts` are kept in its place."""
        replica = self.replicas.get(id(wrapped))
        if replica is not None:
            replica.last_facts = facts
            self._archive(replica)

    def inside_of(self, module: torch.nn.Module) -> Replica | None:
        """Return the DDP object that has `module` inside, not a copy of it; None for none."""
        replica = self.modules.get(id(module))
        return replica if replica is not None and replica.module() is module else None

    def backward(self, loss: Any) -> None:
        """A backward of `loss` begins."""
        # In each backward of the user's: cheap things first, and nothing that waits for a device.
        number = self.backwards
        self.backwards = number + 1
        self._buckets = self._small_buckets = 0
        optimizers = self.optimizers.values()
        self._watched = [
            g for each in optimizers if (g := each.gradients) is not None and g.watched
        ]
        for gradients in self._watched:
            gradients.backward_begins()
        for replica in self.replicas.values():
            replica.backward()
        value = None
        if isinstance(loss, torch.Tensor) and loss.is_cpu and loss.numel() == 1:
            value = float(loss.item())
            if self.nan_backward is None and not math.isfinite(value):
                self._is_bad(number, "the loss")
        self.split.backward(number, value)

    def backward_over(self) -> None:
        """A backward has ended well."""
        for gradients in self._watched:
            gradients.backward_ends()

    def bucket(self, gradients: torch.Tensor) -> None:
        """A bucket of this rank's own gradients is about to be reduced."""
        self._buckets += 1
        small = gradients.numel() <= 4096
        if small:
            # To look at such a bucket would take as long as to send it: of those of one backward
            # the first four are looked at, and one of sixteen of the others.
            self._small_buckets = seen = self._small_buckets + 1
            if seen > 4 and seen % 16:
                return
        if self.nan_backward is not None or not gradients.is_cpu:
            return
        # 256 values of a larger one, which is one flat piece of memory. By one operator, not by a
        # view and a slice: each takes 10 us when the backward has just been through the caches.
        probe = gradients
        if not small:
            probe = torch.as_strided(gradients, (256,), (gradients.numel() // 256,))
        # A sum may overflow though each value is finite: that is looked at then alone.
        if not math.isfinite(probe.sum().item()) and not probe.isfinite().all():
            self._is_bad(max(0, self.backwards - 1), "a gradient")

    def _is_bad(self, number: int, what: str) -> None:
        self.nan_backward, self.nan_what = number, what
        self.nan_place = self.call_sites.users_line()

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to make a step."""
        self._optimizer(optimizer).step_begins(optimizer)

    def module_loads(self, module: torch.nn.Module) -> None:
        """`load_state_dict` of a module is called: it may be a part of a DDP object."""
        for replica in self.replicas.values():
            wrapped = replica.ref()
            if wrapped is not None and any(part is module for part in wrapped.modules()):
                replica.add_load()

    def optimizer_loads(self, optimizer: torch.optim.Optimizer) -> None:
        """`load_state_dict` of an optimizer is called."""
        self._optimizer(optimizer).add_load()

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has made a step."""
        buckets = self._buckets if len(self.replicas) == 1 else 0
        self._optimizer(optimizer).step(optimizer, buckets)

    def metric(self, optimizer: torch.optim.Optimizer, value: float) -> None:
        """ReduceLROnPlateau judges by this value whether the learning rate is to be lower."""
        metrics = self._optimizer(optimizer).metrics
        if len(metrics) < 32:
            metrics.append(value)

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> TrackedOptimizer:
        # By its id, which another object may get when it is gone: so the reference is compared too.
        found = self.optimizers.get(id(optimizer))
        if found is None or found.ref() is not optimizer:
            if len(self.optimizers) >= _MOST:
                self.optimizers.pop(next(iter(self.optimizers)))
            found = self.optimizers[id(optimizer)] = TrackedOptimizer(optimizer, self)
        return found
