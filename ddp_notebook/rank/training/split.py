"""This rank's part of a model that is split over ranks, in its first training steps.

A model whose own forward communicates is known by its frames at a collective of a new kind; from
then on a hook sees a few of its inputs, and DTensor.from_local says what is to be the same on all
ranks of a mesh. Afterwards both are taken out again. Of the parameters of its optimizers that
all of these ranks have, digests are made before the first step and after a few of the next ones.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from ddp_notebook import model
from ddp_notebook.model import Ranks
from ddp_notebook.rank import torch_private
from ddp_notebook.rank.collectives.call_sites import CallSites
from ddp_notebook.rank.inspect.frames import chain
from ddp_notebook.rank.training import digests, fsdp_private, held
from ddp_notebook.rank.training.inputs import drops_out, hash_of, random_state
from ddp_notebook.rank.training.patching import ModuleHook

if TYPE_CHECKING:
    from ddp_notebook.model import TensorDigest

_MODULE, _TENSOR = torch.nn.Module.__module__, "torch.distributed.tensor"
_SHARDED = "torch.distributed.fsdp"
_MOST_CLAIMS = 64
_CHANGED = (AttributeError, TypeError, ValueError, RuntimeError, KeyError, IndexError)


class _Root:
    """A model whose forward communicates, and what it has got so far."""

    def __init__(self, module: torch.nn.Module, key: str, line: model.Place | None) -> None:
        self.ref = weakref.ref(module)
        self.seen = model.Forwards(key, place=line)
        self.handle: Any = None

    def take_out(self) -> None:
        """Remove the hook."""
        if self.handle is not None:
            self.handle.remove()
            self.handle = None


class Split:
    """The split models of this run."""

    def __init__(self, call_sites: CallSites) -> None:
        self._call_sites = call_sites
        self._roots: list[_Root] = []
        self._from_local: Any = None
        """torch's own function, while ours replaces it."""
        self.trains: Callable[[Any], None] = lambda _inputs: None
        """Called with what such a model gets in its first training forwards."""
        self.begin()

    def begin(self) -> None:
        """Forget the last run."""
        self.take_out()
        self._roots = []
        self._claims: list[model.Claim] = []
        self._sums: dict[Ranks, None] = {}
        self.losses: list[float] = []
        self.backwards = self._seen = 0

    def take_out(self) -> None:
        """Remove the hooks: the run is over."""
        for root in self._roots:
            root.take_out()
        self._let_be()

    # -- what is seen of collectives -------------------------------------------------------

    def see(
        self,
        frame: FrameType | None,
        method: str,
        args: Sequence[Any],
        ranks: Ranks,
        part: model.Part | None,
    ) -> None:
        """A collective of a new kind is called on these frames, by a `part` of DDP or others."""
        self._seen += part is None
        if part is not None or self._seen > 2000:
            return  # no kind of these calls is known: they come here each time
        with contextlib.suppress(*_CHANGED):
            stack = list(islice(chain(frame), 200))
            # Told apart by modules on the stack: DTensor's own code redistributes as its placements
            # say, FSDP's reduces gradients, and only what is neither can be a sum of the user's
            # own.
            modules = [str(outer.f_globals.get("__name__", "")) for outer in stack]
            placed = any(module.startswith(_TENSOR) for module in modules)
            own = not placed and not any(module.startswith(_SHARDED) for module in modules)
            own = own and method == "allreduce" and len(self._sums) < 16
            # The forward or backward of a torch.autograd.Function has its context first.
            firsts = (
                outer.f_locals.get(outer.f_code.co_varnames[0])
                for outer in stack
                if outer.f_code.co_name in ("forward", "backward") and outer.f_code.co_argcount
            )
            context = torch.autograd.function.FunctionCtx
            if own and args[0][0].dim() > 1 and any(isinstance(first, context) for first in firsts):
                self._sums[ranks] = None
            # The outermost module: it is the model.
            for caller, name in zip(reversed(stack), reversed(modules), strict=True):
                if name == _MODULE and caller.f_code.co_name == torch_private.CALL_OF_MODULE:
                    self._root(caller.f_locals["self"], placed, caller.f_back)
                    break

    def _root(self, module: torch.nn.Module, placed: bool, caller: FrameType | None = None) -> None:
        if any(torch_private.is_compiled(part) for part in module.modules()):
            return  # a hook would have it compiled again
        if placed:
            self._hear_claims()
        if len(self._roots) >= 4 or any(root.ref() is module for root in self._roots):
            return
        name = type(module).__name__
        number = Counter(root.seen.key.partition(" ")[0] for root in self._roots)[name]
        path = self._call_sites.users_path(caller)
        root = _Root(module, f"{name} {number}", path[-1] if path else None)
        self._roots.append(root)
        hook = ModuleHook(lambda of, args, named: self._forward(root, of, (args, named)))
        root.handle = module.register_forward_pre_hook(hook, with_kwargs=True)

    def _forward(self, root: _Root, module: torch.nn.Module, inputs: Any) -> None:
        if root.ref() is not module or not torch.is_grad_enabled():
            return
        with contextlib.suppress(*_CHANGED):
            seen = root.seen
            drops = seen.drops
            if not seen.inputs:
                drops = any(part.training and drops_out(part) for part in module.modules())
            got = model.Input(self.backwards, hash_of(inputs), random_state())
            root.seen = replace(seen, inputs=(*seen.inputs, got), drops=drops)
            self.trains(inputs)
            if len(root.seen.inputs) >= 8:
                root.take_out()

    # -- what DTensor is told --------------------------------------------------------------

    def _hear_claims(self) -> None:
        owner = getattr(sys.modules.get(_TENSOR), "DTensor", None)
        original = getattr(owner, "from_local", None)
        if original is None or self._from_local is not None or len(self._claims) >= _MOST_CLAIMS:
            return

        def from_local(
            local_tensor: Any, device_mesh: Any = None, placements: Any = None, **named: Any
        ) -> Any:
            __tracebackhide__ = True
            with contextlib.suppress(*_CHANGED):
                self._claimed(local_tensor, device_mesh, placements)
            return original(local_tensor, device_mesh, placements, **named)

        # In its place only while it is needed: a wrapper around a static method of torch's costs
        # each DTensor that is made, and the compiler refuses to trace it.
        self._from_local = original
        owner.from_local = staticmethod(from_local)  # type: ignore[union-attr]

    def _let_be(self) -> None:
        owner = getattr(sys.modules.get(_TENSOR), "DTensor", None)
        if self._from_local is not None and owner is not None:
            owner.from_local = staticmethod(self._from_local)
        self._from_local = None

    def _claimed(self, tensor: Any, mesh: Any, placements: Any) -> None:
        if mesh is None or placements is None or not torch.is_grad_enabled():
            return
        ranks = fsdp_private.replicated_over(mesh, placements)
        local = fsdp_private.local_part(tensor)
        if len(ranks) < 2 or local is None or isinstance(tensor, torch.nn.Parameter):
            return
        digest = digests.digest("", local.reshape(-1)[: 2**16])
        if digest is not None:
            place = self._call_sites.users_line()
            self._claims.append(model.Claim(self.backwards, ranks, digest, place))
        if len(self._claims) >= _MOST_CLAIMS:
            self._let_be()

    # -- what is seen of training ----------------------------------------------------------

    def backward(self, number: int, loss: float | None) -> None:
        """The backward of this number begins, of a loss that is known where it is on a CPU."""
        self.backwards = number + 1
        if loss is not None and len(self.losses) < 8:
            self.losses.append(loss)

    def copies_of(self, optimizer: torch.optim.Optimizer) -> Copies:
        """Return what other ranks have too of an optimizer that is about to step."""
        with contextlib.suppress(*_CHANGED):
            if self._sums and not self._roots:  # only backwards communicate: no frame names a model
                trained = {id(each) for _, each in digests.named(optimizer.param_groups)}
                for module in held.roots():
                    if any(id(parameter) in trained for parameter in module.parameters()):
                        self._root(module, placed=False)
            models = [model for root in self._roots if (model := root.ref()) is not None]
            named = (pair for model in models for pair in model.named_parameters())
            return Copies(optimizer, {id(parameter): name for name, parameter in named})
        return Copies()

    def flat(self) -> dict[int, Ranks]:
        """The ranks over which FSDP1 shards, by the ids of parameters."""
        return fsdp_private.flat(module for e in self._roots if (module := e.ref()) is not None)

    # -- reports ------------------------------------------------------------------------------

    def facts(self, copies: Iterable[Copies]) -> model.SplitFacts:
        """All facts; `copies` are those of the run's optimizers."""
        return model.SplitFacts(
            tuple(self._claims),
            tuple(islice((copy for each in copies for copy in each.facts()), 192)),
            tuple(root.seen for root in self._roots),
            tuple(self._sums),
            tuple(self.losses) if self._sums else (),
        )


# -- what all of these ranks have ------------------------------------------------------


class Copies:
    """The replicated parameters of one optimizer."""

    def __init__(
        self, optimizer: torch.optim.Optimizer | None = None, names: Mapping[int, str] = {}
    ) -> None:
        self._steps = 0
        places = digests.named(optimizer.param_groups if optimizer is not None else ())
        named = [(names.get(id(parameter), place), parameter) for place, parameter in places]
        self.split = any(fsdp_private.is_placed(tensor) for _, tensor in named)
        """Some of its parameters are DTensors."""
        self._copies = list(_copies(named))[:24] if self.split else []
        """Each with its tensor."""

    def stepped(self) -> None:
        """Make digests after the first steps: each takes as long as to read the values."""
        self._steps += 1
        if self._copies and self._steps in (1, 2, 4, 8):
            self._look()

    def facts(self) -> tuple[model.Copy, ...]:
        """The digests, current or the last ones."""
        self._look()
        return tuple(copy for _, copy in self._copies) if self._steps else ()

    def _look(self) -> None:
        self._copies = [
            (ref, replace(copy, end=_digest_of(copy.name, ref()) or copy.end))
            for ref, copy in self._copies
        ]


def _copies(
    named: list[tuple[str, torch.Tensor]],
) -> Iterable[tuple[weakref.ref[torch.Tensor], model.Copy]]:
    placed = {
        id(tensor): list(fsdp_private.rows(tensor))
        for _, tensor in named
        if fsdp_private.is_placed(tensor)
    }
    split, data = _split_rows(placed)
    for name, tensor in named:
        digest = _digest_of(name, tensor) if tensor.grad is not None else None
        if digest is not None:
            own = placed.get(id(tensor), [])
            # A DTensor says itself what it is along its own rows; of others only the plan does.
            others = [r for r in split if not any(set(r.ranks) <= set(o.ranks) for o in own)]
            others = others if id(tensor) in placed else [*split, *data]
            ref = weakref.ref(tensor)
            for row in (*(row for row in own if not row.sharded), *others):
                yield ref, model.Copy(name, row.ranks, row in own, digest, digest)


def _split_rows(
    placed: Mapping[int, list[fsdp_private.Row]],
) -> tuple[list[fsdp_private.Row], list[fsdp_private.Row]]:
    """The rows along which these parameters are in parts: by a plan, and by FSDP2."""
    # FSDP2 shards a plan's shards once more. Along its own row ranks train on other samples, so
    # what they have in common is kept equal by it, and not by the plan.
    managed = {id(e.tensor): e.group for e in fsdp_private.held_by_units().values()}
    planned: dict[Ranks, fsdp_private.Row] = {}
    by_fsdp: dict[Ranks, fsdp_private.Row] = {}
    for number, rows in placed.items():
        for row in rows:
            if row.sharded:
                (by_fsdp if row.ranks == managed.get(number) else planned)[row.ranks] = row
    return list(planned.values()), list(by_fsdp.values())


def _digest_of(name: str, tensor: Any) -> TensorDigest | None:
    """Digest the first values that this rank has; None if they cannot be read without waiting."""
    local = fsdp_private.local_part(tensor) if tensor is not None else None
    if local is None or not local.is_contiguous():
        return None
    return digests.digest(name, local.view(-1)[: 2**14])
