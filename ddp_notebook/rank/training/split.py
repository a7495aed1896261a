"""What this rank has of a model that is split over ranks, in its first training steps.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from ddp_notebook import model
from ddp_notebook.model import Ranks
from ddp_notebook.rank import torch_private
from ddp_notebook.rank.collectives.call_sites import CallSites, Line, place_of
from ddp_notebook.rank.training import digests, fsdp_private, held
from ddp_notebook.rank.training.inputs import drops_out, hash_of, random_state
from ddp_notebook.rank.training.patching import ModuleHook

if TYPE_CHECKING:
    from ddp_notebook.model import TensorDigest

_MODULE, _TENSOR = torch.nn.Module.__module__, "torch.distributed.tensor"
_SHARDED = "torch.distributed.fsdp"
_MOST_FRAMES, _MOST_SEEN = 200, 2000
_MOST_ROOTS, _MOST_INPUTS, _MOST_CLAIMS, _MOST_LOSSES = 4, 8, 64, 8
_MOST_SUMS, _MOST_COPIES, _MOST_REPORTED, _COPIED_VALUES = 16, 24, 192, 2**14
_LOOKED_AT = (1, 2, 4, 8)
"""Copies are digested after these steps."""
_VALUES = 2**16
_CHANGED = (AttributeError, TypeError, ValueError, RuntimeError, KeyError, IndexError)


class _Root:
    """A model whose forward communicates."""

    def __init__(self, module: torch.nn.Module, key: str, line: Line | None) -> None:
        self.ref = weakref.ref(module)
        self.key = key
        self.line = line
        self.inputs: list[model.Input] = []
        self.drops = False
        """It has layers that drop values at random."""
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

    def sees(self, module: torch.nn.Module) -> bool:
        """True of a model whose forwards are seen here."""
        return any(root.ref() is module for root in self._roots)

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
        if part is not None or self._seen > _MOST_SEEN:
            return  # no kind of these calls is known: they come here each time
        with contextlib.suppress(*_CHANGED):
            self._see(list(_frames(frame)), method, args, ranks)

    def _see(self, stack: list[FrameType], method: str, args: Sequence[Any], ranks: Ranks) -> None:
        modules = [str(frame.f_globals.get("__name__", "")) for frame in stack]
        placed = any(module.startswith(_TENSOR) for module in modules)
        if method == "allreduce" and not any(e.startswith((_TENSOR, _SHARDED)) for e in modules):
            self._summed(stack, args[0], ranks)
        call = _outermost(stack, modules, _MODULE, torch_private.CALL_OF_MODULE)
        if call is not None:
            self._root(call.f_locals["self"], placed, call.f_back)

    def _summed(self, stack: list[FrameType], tensors: Sequence[Any], ranks: Ranks) -> None:
        in_function = any(map(_is_of_function, stack))
        if in_function and tensors[0].dim() > 1 and len(self._sums) < _MOST_SUMS:
            self._sums[ranks] = None

    def _root(self, module: torch.nn.Module, placed: bool, caller: FrameType | None = None) -> None:
        if any(torch_private.is_compiled(part) for part in module.modules()):
            return  # a hook would have it compiled again
        if placed:
            self._hear_claims()
        if len(self._roots) >= _MOST_ROOTS or any(root.ref() is module for root in self._roots):
            return
        name = type(module).__name__
        number = Counter(root.key.partition(" ")[0] for root in self._roots)[name]
        path = self._call_sites.users_path(caller)
        root = _Root(module, f"{name} {number}", path[-1] if path else None)
        self._roots.append(root)
        hook = ModuleHook(lambda of, args, named: self._forward(root, of, (args, named)))
        root.handle = module.register_forward_pre_hook(hook, with_kwargs=True)

    def _forward(self, root: _Root, module: torch.nn.Module, inputs: Any) -> None:
        if root.ref() is not module or not torch.is_grad_enabled():
            return
        with contextlib.suppress(*_CHANGED):
            if not root.inputs:
                root.drops = any(part.training and drops_out(part) for part in module.modules())
            root.inputs.append(model.Input(self.backwards, hash_of(inputs), random_state()))
            self.trains(inputs)
            if len(root.inputs) >= _MOST_INPUTS:
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
        digest = digests.digest("", local.reshape(-1)[:_VALUES])
        line = self._call_sites.users_line()
        if digest is not None:
            place = place_of(line)
            self._claims.append(model.Claim(self.backwards, ranks, digest, place))
        if len(self._claims) >= _MOST_CLAIMS:
            self._let_be()

    # -- what is seen of training ----------------------------------------------------------

    def backward(self, number: int, loss: float | None) -> None:
        """The backward of this number begins, of a loss that is known where it is on a CPU."""
        self.backwards = number + 1
        if loss is not None and len(self.losses) < _MOST_LOSSES:
            self.losses.append(loss)

    def copies_of(self, optimizer: torch.optim.Optimizer) -> Copies:
        """Return what other ranks have too of an optimizer that is about to step."""
        with contextlib.suppress(*_CHANGED):
            if self._sums and not self._roots:
                self._find_roots(optimizer)
            return Copies(optimizer, self._names())
        return Copies()

    def _find_roots(self, optimizer: torch.optim.Optimizer) -> None:
        """Find the model where only a backward communicates: no frame names it."""
        trained = {
            id(parameter) for group in optimizer.param_groups for parameter in group["params"]
        }
        for module in held.roots():
            if any(id(parameter) in trained for parameter in module.parameters()):
                self._root(module, placed=False)

    def flat(self) -> dict[int, Ranks]:
        """The ranks over which FSDP1 shards, by the ids of parameters."""
        return fsdp_private.flat(module for e in self._roots if (module := e.ref()) is not None)

    def _names(self) -> dict[int, str]:
        return {
            id(parameter): name
            for root in self._roots
            if (module := root.ref()) is not None
            for name, parameter in module.named_parameters()
        }

    # -- reports ------------------------------------------------------------------------------

    def facts(self, copies: Iterable[Copies]) -> model.SplitFacts:
        """All facts; `copies` are those of the run's optimizers."""
        return model.SplitFacts(
            tuple(self._claims),
            tuple(islice((copy for each in copies for copy in each.facts()), _MOST_REPORTED)),
            tuple(
                model.Forwards(root.key, tuple(root.inputs), place_of(root.line), root.drops)
                for root in self._roots
            ),
            tuple(self._sums),
            tuple(self.losses) if self._sums else (),
        )


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _outermost(
    stack: list[FrameType], modules: list[str], module: str, function: str
) -> FrameType | None:
    """The outermost of these frames, innermost first, that is in a function of a module."""
    return next(
        (
            frame
            for frame, name in zip(reversed(stack), reversed(modules), strict=True)
            if name == module and frame.f_code.co_name == function
        ),
        None,
    )


def _is_of_function(frame: FrameType) -> bool:
    """True of the forward or backward of a torch.autograd.Function."""
    code = frame.f_code
    if code.co_name not in ("forward", "backward") or not code.co_argcount:
        return False
    first = frame.f_locals.get(code.co_varnames[0])
    return isinstance(first, torch.autograd.function.FunctionCtx)


# -- what all of these ranks have ------------------------------------------------------


@dataclass
class _Copy:
    name: str
    tensor: weakref.ref[Any]
    row: fsdp_private.Row
    declared: bool
    begin: TensorDigest
    end: TensorDigest


class Copies:
    """The replicated parameters of one optimizer."""

    def __init__(
        self, optimizer: torch.optim.Optimizer | None = None, names: Mapping[int, str] = {}
    ) -> None:
        self._steps = 0
        named = list(_named(optimizer, names)) if optimizer is not None else []
        self.split = any(fsdp_private.is_placed(tensor) for _, tensor in named)
        """Some of its parameters are DTensors."""
        self._copies = list(_copies(named))[:_MOST_COPIES] if self.split else []

    def stepped(self) -> None:
        """Make digests after a step, if it is one of `_LOOKED_AT`."""
        self._steps += 1
        if self._copies and self._steps in _LOOKED_AT:
            self._look()

    def facts(self) -> tuple[model.Copy, ...]:
        """The digests, current or the last ones."""
        self._look()
        return tuple(
            model.Copy(e.name, e.row.ranks, e.declared, e.begin, e.end)
            for e in self._copies
            if self._steps
        )

    def _look(self) -> None:
        for copy in self._copies:
            copy.end = _digest_of(copy.name, copy.tensor()) or copy.end


def _named(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> Iterable[tuple[str, torch.Tensor]]:
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            yield names.get(id(parameter), f"param_groups[{g}]['params'][{i}]"), parameter


def _copies(named: list[tuple[str, torch.Tensor]]) -> Iterable[_Copy]:
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
            for row in own:
                if not row.sharded:
                    yield _Copy(name, weakref.ref(tensor), row, True, digest, digest)
            for row in _without(own, split) if id(tensor) in placed else [*split, *data]:
                yield _Copy(name, weakref.ref(tensor), row, False, digest, digest)


def _without(own: list[fsdp_private.Row], split: list[fsdp_private.Row]) -> list[fsdp_private.Row]:
    """The rows that none of a tensor's own has."""
    return [r for r in split if not any(set(r.ranks) <= set(other.ranks) for other in own)]


def _split_rows(
    placed: Mapping[int, list[fsdp_private.Row]],
) -> tuple[list[fsdp_private.Row], list[fsdp_private.Row]]:
    """The rows along which these parameters are in parts: by a plan, and by FSDP2."""
    managed = {id(e.tensor): e.group for e in fsdp_private.held_by_units().values()}
    planned: dict[Ranks, fsdp_private.Row] = {}
    by_fsdp: dict[Ranks, fsdp_private.Row] = {}
    for number, rows in placed.items():
        for row in rows:
            if row.sharded:
                (by_fsdp if row.ranks == managed.get(number) else planned)[row.ranks] = row
    return list(planned.values()), list(by_fsdp.values())


def _digest_of(name: str, tensor: Any) -> TensorDigest | None:
    """Of the first values of what this rank has; None for what cannot be read without waiting."""
    local = fsdp_private.local_part(tensor) if tensor is not None else None
    if local is None or not local.is_contiguous():
        return None
    return digests.digest(name, local.view(-1)[:_COPIED_VALUES])
