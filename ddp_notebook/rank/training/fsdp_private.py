"""The one place for the private API of FSDP2 (`fully_shard`) and DTensor: modules, meshes.

Everything is looked up by name, none of it imports FSDP, and nothing here communicates. Where a
release changes it, nothing is known of sharded modules.
"""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ddp_notebook import model
from ddp_notebook.model import Ranks
from ddp_notebook.rank.component import Component, Run
from ddp_notebook.rank.inspect.frames import chain
from ddp_notebook.rank.inspect.safe_repr import TENSORS

PARAM_GROUP_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_STATE_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_state"
_ALL_STATES_MODULE = "torch.distributed._composable_state"
_REDISTRIBUTE_MODULE = "torch.distributed.tensor._redistribute"
# What the reading of a private attribute raises where a release has renamed it or gives it another
# form. Nothing else is caught here.
_CHANGED = (AttributeError, TypeError, ValueError, RuntimeError, KeyError, IndexError)


class HeldByUnit(NamedTuple):
    """A parameter of a unit: what this rank holds of it, and where which ranks gather it.

    `param` is FSDP2's own record of it.
    """

    tensor: torch.Tensor
    gathers: tuple[str, ...]
    group: tuple[int, ...]
    param: Any = None


def root_of(frame: FrameType | None) -> Any:
    """Return what all units of the model share whose FSDP code these frames run; None for none."""
    for outer in islice(chain(frame), 24):
        if outer.f_globals.get("__name__") not in (PARAM_GROUP_MODULE, _STATE_MODULE):
            continue
        # A state, or a group of parameters, whose modules have states.
        owner = outer.f_locals.get("self")
        modules = getattr(owner, "modules", ())
        states = [owner]
        if isinstance(modules, tuple):
            states += [
                each._get_fsdp_state() for each in modules if hasattr(each, "_get_fsdp_state")
            ]
        for state in states:
            context = getattr(state, "_state_ctx", None)
            if hasattr(context, "all_states"):
                return context
    return None


def units(context: Any, number: int = 0) -> tuple[model.ShardedUnit, ...]:
    """Return the units of a model by what `root_of` gave; none where this FSDP is another."""
    with contextlib.suppress(*_CHANGED):
        return tuple(
            model.ShardedUnit(
                number,
                str(group._module_fqn or ""),
                sum(int(param._orig_size.numel()) for param in group.fsdp_params),
                group.post_forward_mesh_info is not None,
                tuple(int(rank) for rank in group.mesh_info.mesh.mesh.flatten().tolist()),
                sum(param.sharded_param.requires_grad for param in group.fsdp_params),
            )
            for state in context.all_states
            for group in groups_of(state)
        )
    return ()


def groups_of(state: Any) -> list[Any]:
    """Return the groups of parameters of a module's state; before torch 2.12 it has one at most."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def purpose(frames: Iterable[FrameType]) -> str:
    """Name what FSDP2 or DTensor communicates in these frames, innermost first; "" for neither."""
    for frame in frames:
        module, known = frame.f_globals.get("__name__"), ""
        with contextlib.suppress(*_CHANGED):
            if module == PARAM_GROUP_MODULE:
                group = frame.f_locals["self"]
                phase = str(group._training_state.name).rpartition("_")[2].lower()
                phase = f", {phase}" if phase in ("forward", "backward") else ""
                known = f"{group._module_fqn or 'the root'} (FSDP2{phase})"
            elif module == _REDISTRIBUTE_MODULE:
                placed = []
                for spec in ("current_spec", "target_spec"):
                    names = [repr(e).removesuffix("()") for e in frame.f_locals[spec].placements]
                    placed.append(names[0] if len(names) == 1 else f"({', '.join(names)})")
                known = f"{' to '.join(placed)} (DTensor)"
        if known:
            return known
    return ""


def in_use() -> bool:
    """True when this process has loaded FSDP2."""
    return _STATE_MODULE in sys.modules


def local_part(tensor: Any) -> torch.Tensor | None:
    """Return what this rank holds of a tensor; None where that is no plain tensor of a CPU."""
    local = getattr(tensor, "_local_tensor", tensor)
    plain = type(local) in TENSORS
    return local.detach() if plain and local.is_cpu else None


def placed_part(value: Any) -> tuple[torch.Tensor, str] | None:
    """Return this rank's part of a DTensor, and how the whole is placed; None for other values.

    The public `to_local` records for autograd, and may wait for a collective.
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or type(value) is not getattr(module, "DTensor", None):
        return None
    local, placements = local_part(value), getattr(value, "placements", ())
    return (local, f"({', '.join(map(repr, placements))})") if local is not None else None


def sharded_in(
    parameters: Iterable[Any], flat_over: Mapping[int, Ranks]
) -> tuple[Ranks, list[Any]]:
    """The ranks among which some of these parameters are sharded, and which; () for none.

    Of meshes within each other the largest; none where there are others beside each other.
    `flat_over` is what `flat` gave.
    """
    # Meshes beside each other are of experts or stages, of which no ranks hold one whole model.
    meshes: set[Ranks] = set()
    sharded = []
    for parameter in parameters:
        ranks = flat_over.get(id(parameter), ())
        mesh = getattr(parameter, "device_mesh", None)
        placements = getattr(parameter, "placements", ())
        if not ranks and mesh is not None and any(each.is_shard() for each in placements):
            ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
        if ranks:
            meshes.add(ranks)
            sharded.append(parameter)
    largest = max(meshes, key=len, default=())
    if any(not set(ranks) <= set(largest) for ranks in meshes):
        return (), []
    return largest, sharded


def flat(roots: Iterable[torch.nn.Module]) -> dict[int, Ranks]:
    """By the id of each parameter in these models that FSDP1 (FullyShardedDataParallel) shards:
    the ranks over which it does."""
    found: dict[int, Ranks] = {}
    for module in (module for root in roots for module in root.modules()):
        with contextlib.suppress(*_CHANGED):
            handle = getattr(module, "_handle", None)
            whole = getattr(handle, "flat_param", None)
            if handle is not None and whole is not None:
                ranks = tuple(sorted(members(handle.process_group)))
                found |= {id(each): ranks for each in (whole, *(whole._params or ()))}
    return found


class Pending:
    """Gradients of sharded parameters that are kept unreduced: what `set_requires_gradient_sync`
    and `set_requires_all_reduce` leave, to be reduced with those of a later backward."""

    def __init__(self, parameters: set[int]) -> None:
        self._groups = [
            weakref.ref(group)
            for group in _groups()
            if any(id(getattr(e, "sharded_param", None)) in parameters for e in _ends(group))
        ]

    def __bool__(self) -> bool:
        # Where FSDP leaves unreduced gradients: of HSDP's outer all-reduce in the group, of
        # parameters in another dtype than gradients in the accumulated ones, else in the gathered
        # parameter's.
        for group in (ref() for ref in self._groups):
            if getattr(group, "_partial_reduce_output", None) is not None:
                return True
            if any(map(is_unreduced, _ends(group))):
                return True
        return False


def gathered(param: Any) -> torch.Tensor | None:
    """The whole tensor of a parameter of FSDP2's, whose gradient a backward brings; None before
    the first forward."""
    return getattr(param, "_unsharded_param", None)


def is_unreduced(param: Any) -> bool:
    """True of a parameter of FSDP2's with a gradient that is kept for a later reduction."""
    kept = getattr(param, "unsharded_accumulated_grad", None)
    return getattr(gathered(param), "grad", None) is not None or kept is not None


def _groups() -> Iterator[Any]:
    """Every group of parameters that FSDP2 communicates together."""
    if not in_use():
        return
    states = getattr(sys.modules.get(_ALL_STATES_MODULE), "_module_state_mapping", {})
    for ref in list(states.values()):
        yield from groups_of(ref())


def held_by_units() -> dict[tuple[int, str], HeldByUnit]:
    """Every parameter that FSDP2 shards, by the id of its module and its name there.

    In a forward the module itself has the gathered tensor.
    """
    found: dict[tuple[int, str], HeldByUnit] = {}
    for group in list(_groups()):
        with contextlib.suppress(*_CHANGED):
            again = group.post_forward_mesh_info is not None
            module = group.modules[0]
            state = module._get_fsdp_state()
            if again and state._is_root is None and state._auto_reshard_after_forward:
                # Before the first forward: the root of a model, which no other unit has inside,
                # stays gathered from then on.
                inside = set(map(id, module.modules()))
                firsts = (each.modules[0] for each in _groups())
                again = any(
                    id(module) in map(id, unit.modules())
                    for unit in firsts
                    if id(unit) not in inside
                )
            gathers = ("forward", "backward") if again else ("forward",)
            ranks = members(getattr(group.mesh_info, "shard_process_group", None))
            for param in group.fsdp_params:
                info = param._module_info
                held = HeldByUnit(param.sharded_param, gathers, ranks, param)
                found[id(info.module), info.param_name] = held
                for module, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                    found[id(module), name] = held
    return found


def members(group: Any) -> Ranks:
    """Return the ranks of a group; none of one that torch does not know, or that was destroyed."""
    with contextlib.suppress(*_CHANGED):
        return tuple(dist.get_process_group_ranks(group)) if group is not None else ()
    return ()


def spec(tensor: Any) -> tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...], Ranks]:
    """A DTensor's placements, and its mesh's dimensions, shape and ranks; all empty for others."""
    with contextlib.suppress(*_CHANGED):
        mesh = tensor.device_mesh
        names = tuple(mesh.mesh_dim_names or ())
        # ``Shard(0)``, ``Replicate``; ``Shard(0) strided`` where FSDP2 shards a shard.
        placements = tuple(
            f"Shard({each.dim})" + " strided" * hasattr(each, "split_factor")
            if each.is_shard() or hasattr(each, "split_factor")
            else repr(each).removesuffix("()")
            for each in tensor.placements
        )
        return placements, names, tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist())
    return (), (), (), ()


def start_of(tensor: Any) -> int:
    """Where in all values of a DTensor this rank's part begins, behind them if that is not one
    piece; 0 of another tensor."""
    whole, placements = tuple(map(int, tensor.shape)), getattr(tensor, "placements", ())
    if not is_placed(tensor) or not whole:
        return 0
    with contextlib.suppress(*_CHANGED):
        utils = sys.modules["torch.distributed.tensor._utils"]
        find = utils.compute_local_shape_and_global_offset
        size, offset = find(whole, tensor.device_mesh, placements)
        if size[1:] == whole[1:] and not any(hasattr(each, "split_factor") for each in placements):
            return int(offset[0]) * math.prod(whole[1:])
    return math.prod(whole)


def _ends(group: Any) -> list[Any]:
    """The first and the last parameter: all of a group are treated the same."""
    parameters = list(getattr(group, "fsdp_params", ()))
    return parameters[:1] + parameters[1:][-1:]


# -- meshes ----------------------------------------------------------------------------


class Row(NamedTuple):
    """The ranks of a mesh that differ from this one in one dimension alone, and its name."""

    ranks: Ranks
    dimension: str
    sharded: bool
    """True if these ranks have other parts of the tensor."""


def along(mesh: Any, free: Sequence[bool]) -> Ranks:
    """The ranks that differ from this one in no dimension but those that are `free`."""
    place = mesh.get_coordinate()
    if place is None:
        return ()
    index = tuple(slice(None) if any_at else at for any_at, at in zip(free, place, strict=True))
    return tuple(sorted(mesh.mesh[index].flatten().tolist()))


def is_placed(tensor: Any) -> bool:
    """True of a DTensor."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def replicated_over(mesh: Any, placements: Iterable[Any]) -> Ranks:
    """The ranks with the same part of a tensor as this one."""
    return along(mesh, [placement.is_replicate() for placement in placements])


def rows(tensor: Any) -> Iterator[Row]:
    """The rows of a DTensor's mesh that this rank is in, of two ranks or more."""
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    for at, placement in enumerate(tensor.placements):
        ranks = along(mesh, [at == other for other in range(mesh.ndim)])
        if len(ranks) > 1:
            yield Row(ranks, str(names[at]), not placement.is_replicate())


# -- the models of a run ---------------------------------------------------------------


class Sharded(Component):
    """The sharded models that issued collectives in this run, in the order in which they did."""

    def __init__(self) -> None:
        self._roots: list[weakref.ref[Any]] = []

    def run_begins(self, run: Run) -> None:
        """Forget the last run."""
        self._roots.clear()

    def see(self, frame: FrameType | None, *_about: object) -> None:
        """Remember the model whose FSDP code issues a collective of a new kind on these frames."""
        if PARAM_GROUP_MODULE not in sys.modules or len(self._roots) >= 8:
            return
        with contextlib.suppress(*_CHANGED):
            root = root_of(frame)
            if root is not None and all(known() is not root for known in self._roots):
                self._roots.append(weakref.ref(root))

    def without(self, held: set[int]) -> tuple[int, ...]:
        """The sizes of the parameters of these models, sorted; none if one has an id of `held`."""
        with contextlib.suppress(*_CHANGED):
            parameters = [
                param.sharded_param
                for known in self._roots
                if (root := known()) is not None
                for state in root.all_states
                for group in groups_of(state)
                for param in group.fsdp_params
            ]
            if held.isdisjoint(map(id, parameters)):
                return tuple(sorted(int(p.numel()) for p in parameters if p.requires_grad))
        return ()

    def units(self) -> tuple[model.ShardedUnit, ...]:
        """The units of all models, as they are now."""
        found = (unit for at, known in enumerate(self._roots) for unit in units(known(), at))
        return tuple(islice(found, 512))
