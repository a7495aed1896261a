"""What this rank has of a model that is split over ranks, in its first training steps.

A model whose own forward communicates is known by its frames at a collective of a new kind; from
then on a hook sees a few of its inputs, and DTensor.from_local says what is to be the same on all
ranks of a mesh. Afterwards both are taken out again.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch

from ddp_notebook import model
from ddp_notebook.model import Ranks
from ddp_notebook.rank import torch_private
from ddp_notebook.rank.collectives.call_sites import CallSites, Line, place_of
from ddp_notebook.rank.training import digests
from ddp_notebook.rank.training.evaluations import drops_out, random_state
from ddp_notebook.rank.training.parallel import fsdp_private, held, meshes
from ddp_notebook.rank.training.parallel.copies import Copies, Reduced
from ddp_notebook.rank.training.parallel.module_hook import ModuleHook
from ddp_notebook.rank.training.samplers import hash_of

_MODULE, _TENSOR = torch.nn.Module.__module__, "torch.distributed.tensor"
_SAVER = "torch.distributed.checkpoint.state_dict_saver"
_SHARDED = "torch.distributed.fsdp"
_MOST_FRAMES, _MOST_SEEN = 200, 2000
_MOST_ROOTS, _MOST_INPUTS, _MOST_CLAIMS, _MOST_LOSSES = 4, 8, 64, 8
_MOST_SUMS, _MOST_REDUCED, _MOST_SAVES = 16, 512, 16
_MOST_OPTIMIZERS = 8
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
        self._sums: dict[tuple[Ranks, bool], Line | None] = {}
        self._reduced: list[Reduced] = []
        self._saves: list[model.CheckpointCall] = []
        self._optimizers: dict[int, Copies] = {}
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

    def see(self, frame: FrameType | None, method: str, args: Sequence[Any], ranks: Ranks) -> None:
        """A collective of a new kind is called, on these frames."""
        self._seen += 1
        if self._seen > _MOST_SEEN:
            return  # no kind of these calls is known: they come here each time
        with contextlib.suppress(*_CHANGED):
            self._see(list(_frames(frame)), method, args, ranks)

    def _see(self, stack: list[FrameType], method: str, args: Sequence[Any], ranks: Ranks) -> None:
        modules = [str(frame.f_globals.get("__name__", "")) for frame in stack]
        placed = any(module.startswith(_TENSOR) for module in modules)
        saver = _outermost(stack, modules, _SAVER, "save")
        if saver is not None:
            self._saving(saver, ranks)
        if method == "allreduce" and not any(e.startswith((_TENSOR, _SHARDED)) for e in modules):
            self._summed(stack, args[0], ranks)
        call = _outermost(stack, modules, _MODULE, torch_private.CALL_OF_MODULE)
        if call is not None:
            self._root(call.f_locals["self"], placed, call.f_back)

    def _summed(self, stack: list[FrameType], tensors: Sequence[Any], ranks: Ranks) -> None:
        function = next((frame for frame in stack if _is_of_function(frame)), None)
        if function is not None:
            key = ranks, function.f_code.co_name == "backward"
            if tensors[0].dim() > 1 and len(self._sums) < _MOST_SUMS:
                self._sums.setdefault(key, self._call_sites.users_line())
        elif len(self._reduced) < _MOST_REDUCED:
            line = self._call_sites.users_line()
            self._reduced += [
                Reduced(self.backwards, tensor.data_ptr(), ranks, line) for tensor in tensors
            ]

    def _saving(self, call: FrameType, ranks: Ranks) -> None:
        path = call.f_locals.get("checkpoint_id")
        known = any(save.path == str(path) for save in self._saves)
        if path is not None and not known and len(self._saves) < _MOST_SAVES:
            line = self._call_sites.users_line()
            self._saves.append(model.CheckpointCall(str(path), ranks, place_of(line)))

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
        ranks = meshes.replicated_over(mesh, placements)
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

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to make a step."""
        known = self._optimizers.get(id(optimizer))
        if known is not None and known.ref() is optimizer:
            return
        if len(self._optimizers) < _MOST_OPTIMIZERS:
            with contextlib.suppress(*_CHANGED):
                if self._sums and not self._roots:
                    self._find_roots(optimizer)
                names = self._names()
                copies = Copies(optimizer, names)
                now = [reduced for reduced in self._reduced if reduced.backwards == self.backwards]
                copies.compare(now, names)
                self._optimizers[id(optimizer)] = copies

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has made the step."""
        known = self._optimizers.get(id(optimizer))
        if known is not None and known.split:
            known.stepped()

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

    def facts(self) -> model.SplitFacts:
        """All facts."""
        optimizers = list(self._optimizers.values())
        return model.SplitFacts(
            tuple(self._claims),
            tuple(copy for optimizer in optimizers for copy in optimizer.facts()),
            tuple(
                model.Forwards(root.key, tuple(root.inputs), place_of(root.line), root.drops)
                for root in self._roots
            ),
            tuple(
                model.PartialSum(ranks, backward, place_of(line))
                for (ranks, backward), line in self._sums.items()
            ),
            tuple(found for optimizer in optimizers for found in optimizer.shard_sums),
            tuple(self._saves),
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
