"""Trained models that no DDP object contains, and copies of modules made before they were wrapped.

Both are looked up once, when an optimizer is about to make its first step: until then nothing
tells a model from any other module. A hook then sees their forwards.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.rank import torch_private
from ddp_notebook.rank.collectives.call_sites import CallSites
from ddp_notebook.rank.training.evaluations import Moments
from ddp_notebook.rank.training.parallel import held
from ddp_notebook.rank.training.parallel.module_hook import ModuleHook

_MOST, _MOST_LOOKS, _MOST_ALIKE = 4, 4, 8
Tell = Callable[["PlainModel", torch.nn.Module, Any], None]


def made_of(module: torch.nn.Module) -> str:
    """The class of a module, and a hash of the names and shapes of its parameters."""
    shapes = [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]
    return f"{type(module).__name__} {zlib.crc32(repr(shapes).encode()):08x}"


class _Watch(ModuleHook):
    """Another class than the hook that shows a DDP object's module, and its copies."""

    __slots__ = ()


class PlainModel:
    """A model that an optimizer trains, and that no DDP object contains."""

    def __init__(self, module: torch.nn.Module, number: int, call_sites: CallSites) -> None:
        self.ref = weakref.ref(module)
        self.type = type(module).__name__
        self.key = f"{made_of(module)} {number}"
        self.moments = Moments(call_sites)
        self.steps = 0
        self.handle: Any = None


class PlainModels:
    """The models without DDP that this process trains."""

    def __init__(self, call_sites: CallSites) -> None:
        self._call_sites = call_sites
        self.tell: Tell = lambda _model, _module, _inputs: None
        """Called before each forward of one of them."""
        self.hook_copy: Callable[[torch.nn.Module], None] = lambda _module: None
        """Called with each module that is a copy of one inside a DDP object."""
        self.begin()

    def begin(self) -> None:
        """Forget the last run."""
        self.take_out()
        self.of: list[PlainModel] = []
        self._by_optimizer: dict[int, list[PlainModel]] = {}
        self._looks = 0

    def take_out(self) -> None:
        """Remove the hooks: the run is over."""
        for each in getattr(self, "of", ()):
            each.moments.backward()
            if each.handle is not None:
                each.handle.remove()
                each.handle = None

    def step_begins(
        self, optimizer: torch.optim.Optimizer, inside: Callable[[], Iterable[Any]]
    ) -> None:
        """An optimizer makes a step; `inside` gives the modules in DDP objects."""
        models = self._by_optimizer.get(id(optimizer))
        if models is None:
            if self._looks >= _MOST_LOOKS:
                return
            self._looks += 1
            models = self._by_optimizer[id(optimizer)] = []
            # Of all modules that exist, some of the user's may be half made.
            with contextlib.suppress(Exception):
                models += self._find(optimizer, list(inside()))
        for model in models:
            model.steps += 1

    def _find(self, optimizer: torch.optim.Optimizer, inside: list[Any]) -> Iterator[PlainModel]:
        trained = {
            id(parameter) for group in optimizer.param_groups for parameter in group["params"]
        }
        roots = held.roots()
        wrapped = [module for module in inside if module is not None]
        for module in _copies(roots, wrapped):
            self.hook_copy(module)
        for root in roots:
            held_here = any(id(parameter) in trained for parameter in root.parameters())
            if held_here and len(self.of) < _MOST and not _is_managed(root):
                yield self._add(root)

    def _add(self, root: torch.nn.Module) -> PlainModel:
        known = next((model for model in self.of if model.ref() is root), None)
        if known is not None:
            return known
        name = made_of(root)
        number = sum(model.key.startswith(name) for model in self.of)
        model = PlainModel(root, number, self._call_sites)
        self.of.append(model)
        hook = _Watch(lambda module, args, named: self._forward(model, module, (args, named)))
        model.handle = root.register_forward_pre_hook(hook, with_kwargs=True)
        return model

    def _forward(self, model: PlainModel, module: torch.nn.Module, inputs: Any) -> None:
        if model.ref() is module:
            self.tell(model, module, inputs)


def _is_managed(root: torch.nn.Module) -> bool:
    """True of what DDP sees to, and of what would be compiled again for a hook."""
    return any(
        isinstance(module, DistributedDataParallel) or torch_private.is_compiled(module)
        for module in root.modules()
    )


def _copies(roots: Iterable[torch.nn.Module], wrapped: list[Any]) -> Iterator[torch.nn.Module]:
    """Modules of the class and the parameters of a wrapped one, outside of all DDP objects."""
    wanted = {made_of(module) for module in wrapped}
    types = {type(module) for module in wrapped}
    found = 0
    for root in roots if wanted else ():
        if isinstance(root, DistributedDataParallel):
            continue
        for part in root.modules():
            own = type(part) in types and not any(part is each for each in wrapped)
            if own and found < _MOST_ALIKE and made_of(part) in wanted:
                found += 1
                yield part
