"""The parts of every model's parameters that this rank holds, looked up on request.

Called on the thread that answers questions, whatever the main thread does. Nothing communicates,
and nothing of the user's runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook import model
from ddp_notebook.rank.inspect.frames import chain, main_frame
from ddp_notebook.rank.inspect.global_names import GlobalNames
from ddp_notebook.rank.inspect.objects import objects_of
from ddp_notebook.rank.training import fsdp_private

_MOST_PARAMETERS = 2000
_WRAPPED = "module."
"""The prefix that DDP gives the names of its parameters."""


class Held:
    """Answers what this rank holds; `names` are the user's global variables."""

    def __init__(self, names: GlobalNames) -> None:
        self._names = names

    def parameters(self) -> model.HeldParameters:
        """The parameters of all models, those of one model one after another."""
        spaces = self.spaces()
        found: list[model.HeldParameter] = []
        for root in roots():
            name, wrapper = variable_of(root, spaces) or type(root).__name__, ""
            group: tuple[int, ...] = ()
            if isinstance(root, DistributedDataParallel):
                wrapper, group = "DDP", tuple(dist.get_process_group_ranks(root.process_group))
            for parameter, tensor, unit in parameters_of(root):
                local = getattr(tensor, "_local_tensor", tensor)
                held = model.HeldParameter(
                    name,
                    parameter.removeprefix(_WRAPPED) if wrapper else parameter,
                    tuple(map(int, tensor.shape)),
                    str(tensor.dtype).removeprefix("torch."),
                    local.numel() * local.element_size(),
                    tensor.numel() * tensor.element_size(),
                    *fsdp_private.spec(tensor),
                    "FSDP2" if unit is not None else wrapper,
                    unit.gathers if unit is not None else (),
                    unit.group if unit is not None else group,
                )
                found.append(held)
        return model.HeldParameters(tuple(found[:_MOST_PARAMETERS]), len(found[_MOST_PARAMETERS:]))

    def spaces(self) -> list[Mapping[str, Any]]:
        """The user's global variables, and those of the functions that the main thread runs, the
        outermost first."""
        spaces = [self._names.get()]
        for outer in reversed([*islice(chain(main_frame()), 64)]):
            with contextlib.suppress(RuntimeError):
                spaces.append(dict(outer.f_locals))
        return spaces


def variable_of(value: object, spaces: Iterable[Mapping[str, Any]]) -> str:
    """Return the name of the first of these variables that has `value`; empty without one."""
    for variables in spaces:
        for name, other in list(variables.items()):
            if other is value and not name.startswith("_"):
                return name
    return ""


def parameters_of(
    root: torch.nn.Module,
) -> Iterator[tuple[str, torch.Tensor, fsdp_private.HeldByUnit | None]]:
    """Each parameter once: its name, what this rank holds of it, its unit of FSDP2."""
    units = fsdp_private.held_by_units()
    seen: set[int] = set()
    for prefix, module in list(root.named_modules()):
        for name, plain in list(module._parameters.items()):
            unit = units.get((id(module), name))
            tensor = unit.tensor if unit is not None else plain
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield (f"{prefix}.{name}" if prefix else name), tensor, unit


def roots() -> list[torch.nn.Module]:
    """Modules with parameters that no other module contains."""
    modules = objects_of(torch.nn.Module)
    parts = (vars(module).get("_modules", {}) for module in modules)
    children = {id(part) for each in parts for part in each.values()}
    roots = [module for module in modules if id(module) not in children]
    return [root for root in roots if next(root.parameters(), None) is not None]
