"""One variable: numbers, tensors, models, optimizers; anything else as a short text.

Nothing of the user's is run: what a model or an optimizer holds is read from where torch's own
base class keeps it, and not by its methods.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ddp_notebook.model import Variable
from ddp_notebook.rank.inspect import safe_repr
from ddp_notebook.rank.inspect.safe_repr import TENSORS
from ddp_notebook.rank.training.fsdp_private import placed_part
from ddp_notebook.rank.variables.digests import Digester
from ddp_notebook.rank.variables.tensors import TensorReader, sample

_ATTRIBUTES_OF = torch.nn.Module.__dict__["__dict__"].__get__
_MOST_SAMPLED = 200
"""How many parameters of a model are compared between ranks, by a few values each."""
_LARGEST = 2**53
"""Larger whole numbers are not exact as a float."""
_MOST_GROUPS = 3
_NUMPY_NUMBERS = "?bBhHiIlLqQefdFD"
"""Of NumPy's types those that are one of Python's numbers."""


def describe(
    name: str, value: Any, reader: TensorReader, digester: Digester | None = None
) -> Variable:
    """Describe a variable, with a digest where `digester` can make one. Raises nothing."""
    try:
        variable = _described(name, value, reader)
    except Exception:  # noqa: BLE001  # it may change while it is looked at
        variable = Variable(name, safe_repr.of(value))
    if digester is None or variable.tensor is not None or variable.number is not None:
        return variable
    is_model = safe_repr.inherits(value, torch.nn.Module)
    digest = digester.of(list(_tensors(value)) if is_model else value)
    return replace(variable, digest=digest) if digest else variable


def _described(name: str, value: Any, reader: TensorReader) -> Variable:
    kind = type(value)
    if kind in (int, float):
        return Variable(name, safe_repr.of(value), _number(value))
    if kind in TENSORS and not value.is_nested:
        return Variable(name, tensor=reader.facts(value))
    if (part := placed_part(value)) is not None:
        facts, kinds = reader.facts(part[0]), f"{safe_repr.class_name(value)}{part[1]}"
        return Variable(name, tensor=replace(facts, dtype=f"{kinds}, here {facts.dtype}"))
    if safe_repr.inherits(value, torch.nn.Module):
        return _module(name, value)
    if safe_repr.inherits(value, torch.optim.Optimizer):
        return Variable(name, _optimizer(value))
    return _numpys(name, value, reader) or Variable(name, safe_repr.of(value))


def _numpys(name: str, value: Any, reader: TensorReader) -> Variable | None:
    """An array or a number of NumPy's own types; None for any other value."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if type(value) is getattr(numpy, "ndarray", None):
        return Variable(name, tensor=reader.array_facts(value))
    if type(value) in {numpy.dtype(code).type for code in _NUMPY_NUMBERS}:
        return _described(name, value.item(), reader)
    return None


def _number(value: float) -> float | None:
    """The value as a float; None for one that is no number, or not exact as a float."""
    exact = abs(value) < _LARGEST or type(value) is float
    return float(value) if exact and not math.isnan(value) else None


# -- models --------------------------------------------------------------------------------


def _module(name: str, module: Any) -> Variable:
    """A model: its class, how many parameters, how many of them do not train, whether it does."""
    parameters = list(_parameters(module))
    count = sum(parameter.numel() for parameter in parameters)
    frozen = sum(tensor.numel() for tensor in parameters if not tensor.requires_grad)
    size = f"{count:,} parameters{f' ({frozen:,} frozen)' if frozen else ''}"
    mode = "train" if _ATTRIBUTES_OF(module).get("training") is True else "eval"
    return Variable(name, f"{_class(module)}, {size}, {mode}", digest=_of(parameters))


def _class(module: Any) -> str:
    """The name of its class; of a DDP object also that of the model in it."""
    own = safe_repr.class_name(module)
    inner = _ATTRIBUTES_OF(module).get("_modules", {}).get("module")
    wrapped = type(module) is torch.nn.parallel.DistributedDataParallel and inner is not None
    return f"DDP({safe_repr.class_name(inner)})" if wrapped else own


def _parameters(module: Any) -> Iterator[torch.Tensor]:
    """The parameters of a module and its submodules, each once."""
    seen: set[int] = set()
    for each in _modules(module):
        for parameter in list(_ATTRIBUTES_OF(each).get("_parameters", {}).values()):
            if type(parameter) in TENSORS and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def _modules(module: Any) -> Iterator[Any]:
    """A module and its submodules, each once."""
    seen: set[int] = set()
    waiting = [module]
    while waiting:
        each = waiting.pop()
        yield each
        for inner in list(_ATTRIBUTES_OF(each).get("_modules", {}).values()):
            if safe_repr.inherits(inner, torch.nn.Module) and id(inner) not in seen:
                seen.add(id(inner))
                waiting.append(inner)


def _tensors(module: Any) -> Iterator[torch.Tensor]:
    """The parameters of a module, and the buffers of all submodules."""
    yield from _parameters(module)
    for each in _modules(module):
        buffers = list(_ATTRIBUTES_OF(each).get("_buffers", {}).values())
        yield from (buffer for buffer in buffers if type(buffer) in TENSORS)


def _of(parameters: list[torch.Tensor]) -> str:
    """A text that differs where these parameters differ from those of another rank.

    Some values of the first ones. Empty where they cannot be read: on a GPU, in parts.
    """
    crc = 0
    for parameter in parameters[:_MOST_SAMPLED]:
        flat = parameter.detach()
        held = flat.untyped_storage().nbytes() >= flat.numel() * flat.element_size()
        if flat.device.type != "cpu" or not flat.is_contiguous() or not held:
            return ""
        crc = zlib.crc32(repr(sample(flat.view(-1))).encode(), crc)
    return f"{crc:08x}"


# -- optimizers ----------------------------------------------------------------------------


def _optimizer(optimizer: Any) -> str:
    """An optimizer: its class, and the learning rate of each group of parameters."""
    attributes = torch.optim.Optimizer.__dict__["__dict__"].__get__(optimizer)
    groups = [group for group in attributes.get("param_groups", ()) if type(group) is dict]
    rates = list(dict.fromkeys(_rate(group.get("lr")) for group in groups))
    more = f", … of {len(rates)}" if len(rates) > _MOST_GROUPS else ""
    shown = ", ".join(rates[:_MOST_GROUPS])
    return f"{safe_repr.class_name(optimizer)}, lr {shown or '?'}{more}"


def _rate(rate: Any) -> str:
    is_tensor = type(rate) in TENSORS and rate.device.type == "cpu" and rate.numel() == 1
    return f"{rate.item():.6g}" if is_tensor else safe_repr.of(rate)
