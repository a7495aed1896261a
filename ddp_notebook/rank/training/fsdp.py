"""The one place for private API of FSDP2 and DTensor: sharded parameters and their gradients.

Nothing here communicates. What this torch does not have is taken for not there.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ddp_notebook.model import Ranks

_STATES = "torch.distributed._composable_state"
_OF_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_state"


def in_use() -> bool:
    """True when this process has loaded FSDP2."""
    return _OF_FSDP in sys.modules


def local_part(tensor: Any) -> torch.Tensor | None:
    """What this rank holds of a tensor; None where that is no plain tensor of a CPU."""
    local = getattr(tensor, "_local_tensor", tensor)
    plain = type(local) in (torch.Tensor, torch.nn.Parameter)
    return local.detach() if plain and local.is_cpu else None


def mesh_of(parameters: Iterable[Any]) -> Ranks:
    """The ranks among which these parameters are sharded; none unless all are, in one mesh."""
    found: set[Ranks] = set()
    for parameter in parameters:
        mesh = getattr(parameter, "device_mesh", None)
        placements = getattr(parameter, "placements", ())
        if mesh is None or not any(each.is_shard() for each in placements):
            return ()
        found.add(tuple(sorted(mesh.mesh.flatten().tolist())))
    return found.pop() if len(found) == 1 else ()


class Pending:
    """Gradients of sharded parameters that are kept unreduced: what `set_requires_gradient_sync`
    and `set_requires_all_reduce` leave, to be reduced with those of a later backward."""

    def __init__(self, parameters: set[int]) -> None:
        groups = [group for group in _groups() if _holds(group, parameters)]
        self._groups = [weakref.ref(group) for group in groups]

    def __bool__(self) -> bool:
        return any(_is_pending(group) for ref in self._groups if (group := ref()) is not None)


def _groups() -> Iterator[Any]:
    """Every group of parameters that FSDP2 communicates together."""
    if not in_use():
        return
    states = getattr(sys.modules.get(_STATES), "_module_state_mapping", {})
    for ref in list(states.values()):
        state = ref()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [getattr(state, "_fsdp_param_group", None)]
        yield from (group for group in groups if group is not None)


def _ends(group: Any) -> list[Any]:
    """The first and the last parameter: all of a group are treated alike."""
    parameters = list(getattr(group, "fsdp_params", ()))
    return parameters[:1] + parameters[1:][-1:]


def _holds(group: Any, parameters: set[int]) -> bool:
    return any(id(getattr(each, "sharded_param", None)) in parameters for each in _ends(group))


def _is_pending(group: Any) -> bool:
    if getattr(group, "_partial_reduce_output", None) is not None:
        return True
    for each in _ends(group):
        whole = getattr(each, "_unsharded_param", None)
        if getattr(each, "unsharded_accumulated_grad", None) is not None:
            return True
        if whole is not None and whole.grad is not None:
            return True
    return False
