"""The one place for the private API of FSDP2 (`fully_shard`): what it knows of its modules.

Everything is looked up by name, and none of it imports FSDP. Where a release changes it, nothing
is known of sharded modules.
"""

from __future__ import annotations

import contextlib
from types import FrameType
from typing import Any, NamedTuple

PARAM_GROUP_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_STATE_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_state"
_MOST_FRAMES = 24


class Unit(NamedTuple):
    """A module, or several, that FSDP gathers as one; `mesh` are the ranks that have its parts."""

    name: str
    parameters: int
    reshards: bool
    syncs: bool
    mesh: tuple[int, ...]


def root_of(frame: FrameType | None) -> Any:
    """What all units of the model share in whose FSDP code these frames are; None for none."""
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return None
        if frame.f_globals.get("__name__") in (PARAM_GROUP_MODULE, _STATE_MODULE):
            found = _shared(frame.f_locals.get("self"))
            if found is not None:
                return found
        frame = frame.f_back
    return None


def _shared(owner: Any) -> Any:
    """The context of a state, or of the state of a parameter group's module."""
    context = getattr(owner, "_state_ctx", None)
    modules = getattr(owner, "modules", ()) if context is None else ()
    for module in modules if isinstance(modules, tuple) else ():
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        context = getattr(state, "_state_ctx", None)
        if context is not None:
            break
    return context if hasattr(context, "all_states") else None


def units(context: Any) -> tuple[Unit, ...]:
    """The units of a model by what `root_of` gave; () where this FSDP is another."""
    with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):
        return tuple(
            Unit(
                str(group._module_fqn or ""),
                sum(int(each._orig_size.numel()) for each in group.fsdp_params),
                group.post_forward_mesh_info is not None,
                bool(group.reduce_grads),
                tuple(int(rank) for rank in group.mesh_info.mesh.mesh.flatten().tolist()),
            )
            for state in context.all_states
            for group in state._fsdp_param_groups
        )
    return ()
