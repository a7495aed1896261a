"""Models that no DDP object contains, and copies of modules made before they were wrapped.

Both are looked up once, when an optimizer is about to make its first step: until then nothing
tells a model from any other module. Where nothing is trained, what is put in evaluation mode or
loaded may be a model. A hook then sees their forwards.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.model import TensorDigest
from ddp_notebook.rank import torch_private
from ddp_notebook.rank.collectives.call_sites import CallSites
from ddp_notebook.rank.training import digests
from ddp_notebook.rank.training.evaluations import Moments
from ddp_notebook.rank.training.parallel import held
from ddp_notebook.rank.training.parallel.module_hook import ModuleHook
from ddp_notebook.rank.training.tracked import Loads, few_values

_MOST, _MOST_LOOKS, _MOST_ALIKE = 4, 4, 8
_MOST_DIGESTS, _DIGESTED, _LATER_STEP = 256, 2**14, 4
Tell = Callable[["PlainModel", torch.nn.Module, Any], None]


def made_of(module: torch.nn.Module) -> str:
    """The class of a module, and a hash of the names and shapes of its parameters."""
    shapes = [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]
    return f"{type(module).__name__} {zlib.crc32(repr(shapes).encode()):08x}"


class _Watch(ModuleHook):
    """Another class than the hook that shows a DDP object's module, and its copies."""

    __slots__ = ()


class PlainModel:
    """A model that no DDP object contains, and that an optimizer trains, or a run evaluates."""

    def __init__(self, module: torch.nn.Module, number: int, call_sites: CallSites) -> None:
        self.ref = weakref.ref(module)
        self.type = type(module).__name__
        self.key = f"{made_of(module)} {number}"
        self.moments = Moments(call_sites)
        self.loads = Loads(call_sites.users_line)
        self.steps = self.group_size = 0
        self.values: tuple[float, ...] = ()
        """Some of its parameters' at its first forward, as the group's size: at the end of the run
        both may be gone."""
        self.matrices: tuple[tuple[TensorDigest, TensorDigest], ...] = ()
        """Its parameters of several dimensions before its first step, and some steps later."""
        self._first: tuple[TensorDigest, ...] = ()
        self.unregistered: tuple[str, ...] = ()
        """Modules in its dicts and lists, which are no parts of it, and which are trained."""
        self.handle: Any = None

    def step_begins(self) -> None:
        """An optimizer is about to make a step of it."""
        self.steps += 1
        if self.steps == 1:
            self._first = self._digests()
        elif self.steps == _LATER_STEP:
            later = {digest.name: digest for digest in self._digests()}
            pairs = ((first, later.get(first.name)) for first in self._first)
            self.matrices = tuple((first, then) for first, then in pairs if then is not None)

    def _digests(self) -> tuple[TensorDigest, ...]:
        module = self.ref()
        named = module.named_parameters() if module is not None else ()
        found = (
            digests.digest(name, each.detach().view(-1)[:_DIGESTED])
            for name, each in islice(named, _MOST_DIGESTS)
            if each.dim() > 1 and _is_readable(each)
        )
        return tuple(digest for digest in found if digest is not None)


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
        self.judged: list[PlainModel] = []
        """Those that were put in evaluation mode, or loaded, while nothing was trained."""
        self._by_optimizer: dict[int, list[PlainModel]] = {}
        self._looks = 0

    def take_out(self) -> None:
        """Remove the hooks: the run is over."""
        for each in (*getattr(self, "of", ()), *getattr(self, "judged", ())):
            each.moments.backward()
            _unhook(each)

    def judge(self, module: torch.nn.Module, *, loads: bool = False) -> None:
        """A module is put in evaluation mode, or loaded: it may be what this run evaluates."""
        known = next((model for model in self.judged if model.ref() is module), None)
        if known is None and len(self.judged) < _MOST and _is_whole(module):
            known = self._watch(module, self.judged)
        if known is not None and loads:
            known.loads.add()

    def train(self) -> None:
        """This run trains: what it evaluates is no longer all it does."""
        for each in self.judged:
            _unhook(each)
        self.judged.clear()

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
            model.step_begins()

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
                model = self._add(root)
                model.unregistered = tuple(islice(_unregistered(root, trained), _MOST_ALIKE))
                yield model

    def _add(self, root: torch.nn.Module) -> PlainModel:
        known = next((model for model in self.of if model.ref() is root), None)
        if known is not None:
            return known
        return self._watch(root, self.of)

    def _watch(self, root: torch.nn.Module, of: list[PlainModel]) -> PlainModel:
        name = made_of(root)
        number = sum(model.key.startswith(name) for model in of)
        model = PlainModel(root, number, self._call_sites)
        of.append(model)
        hook = _Watch(lambda module, args, named: self._forward(model, module, (args, named)))
        model.handle = root.register_forward_pre_hook(hook, with_kwargs=True)
        return model

    def _forward(self, model: PlainModel, module: torch.nn.Module, inputs: Any) -> None:
        if model.ref() is module:
            if not model.group_size and dist.is_initialized():
                model.group_size, model.values = dist.get_world_size(), few_values(module)
            self.tell(model, module, inputs)


def _unregistered(root: torch.nn.Module, trained: Container[int]) -> Iterator[str]:
    """Modules with such parameters that parts of a module have in a plain dict, list or tuple."""
    known = {id(parameter) for parameter in root.parameters()}
    for prefix, part in root.named_modules():
        for name, value in vars(part).items():
            items = value.items() if isinstance(value, dict) else enumerate(_listed(value))
            for key, inner in items:
                tensors = inner.parameters() if isinstance(inner, torch.nn.Module) else ()
                if any(id(each) in trained and id(each) not in known for each in tensors):
                    yield f"{prefix}.{name}[{key!r}]".removeprefix(".")


def _listed(value: object) -> Iterable[Any]:
    return value if isinstance(value, list | tuple) else ()


def _is_readable(each: torch.Tensor) -> bool:
    return each.is_cpu and type(each.data) is torch.Tensor and each.is_contiguous()


def _unhook(model: PlainModel) -> None:
    if model.handle is not None:
        model.handle.remove()
        model.handle = None


def _is_whole(module: torch.nn.Module) -> bool:
    """True of a module whose parameters this rank has all of, and that nothing manages."""
    parameters = list(module.parameters())
    plain = all(
        not torch.nn.parameter.is_lazy(each) and type(each.data) is torch.Tensor and each.is_cpu
        for each in parameters
    )
    return bool(parameters) and plain and not _is_managed(module)


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
