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
from ddp_notebook.rank.training.parallel.fsdp_private import placed_part
from ddp_notebook.rank.variables.digests import Digester
from ddp_notebook.rank.variables.tensors import TensorReader, sample

_ATTRIBUTES_OF = torch.nn.Module.__dict__["__dict__"].__get__


def describe(
    name: str, value: Any, reader: TensorReader, digester: Digester | None = None
) -> Variable:
    """Describe a variable, with a digest where `digester` can make one. Raises nothing."""
    is_model = safe_repr.inherits(value, torch.nn.Module)
    try:
        variable = _model(name, value) if is_model else _described(name, value, reader)
    except Exception:  # noqa: BLE001  # it may change while it is looked at
        variable = Variable(name, safe_repr.of(value))
    if digester is None or variable.tensor is not None or variable.number is not None:
        return variable
    digest = digester.of(_tensors_of(value) if is_model else value)
    return replace(variable, digest=digest) if digest else variable


def _described(name: str, value: Any, reader: TensorReader) -> Variable:
    kind, numpy = type(value), sys.modules.get("numpy")
    if kind in (int, float):
        # Larger whole numbers are not exact as a float, and NaN is no number.
        exact = kind is float or abs(value) < 2**53
        number = float(value) if exact and not math.isnan(value) else None
        return Variable(name, safe_repr.of(value), number)
    if kind in TENSORS and not value.is_nested:
        return Variable(name, tensor=reader.facts(value))
    if (part := placed_part(value)) is not None:
        facts, kinds = reader.facts(part[0]), f"{safe_repr.class_name(value)}{part[1]}"
        return Variable(name, tensor=replace(facts, dtype=f"{kinds}, here {facts.dtype}"))
    if safe_repr.inherits(value, torch.optim.Optimizer):
        return Variable(name, _optimizer(value))
    if numpy is not None and kind is getattr(numpy, "ndarray", None):
        return Variable(name, tensor=reader.array_facts(value))
    if numpy is not None and kind in {numpy.dtype(code).type for code in "?bBhHiIlLqQefdFD"}:
        return _described(name, value.item(), reader)  # a number of NumPy's that is one of Python's
    return Variable(name, safe_repr.of(value))


def _model(name: str, model: Any) -> Variable:
    """A model: its class, how many parameters, how many of them do not train, whether it does."""
    attributes, parameters = _ATTRIBUTES_OF(model), list(_parameters(model))
    count = sum(parameter.numel() for parameter in parameters)
    frozen = sum(tensor.numel() for tensor in parameters if not tensor.requires_grad)
    size = f"{count:,} parameters{f' ({frozen:,} frozen)' if frozen else ''}"
    mode = "train" if attributes.get("training") is True else "eval"
    kind, inner = safe_repr.class_name(model), attributes.get("_modules", {}).get("module")
    if type(model) is torch.nn.parallel.DistributedDataParallel and inner is not None:
        kind = f"DDP({safe_repr.class_name(inner)})"
    return Variable(name, f"{kind}, {size}, {mode}", digest=_digest_of_some(parameters))


def _digest_of_some(parameters: list[torch.Tensor]) -> str:
    """The digest of some values of the first parameters: of a large model there is no other.

    Empty where they cannot be read: on a GPU, in parts.
    """
    crc = 0
    for parameter in parameters[:200]:
        flat = parameter.detach()
        held = flat.untyped_storage().nbytes() >= flat.numel() * flat.element_size()
        if flat.device.type != "cpu" or not flat.is_contiguous() or not held:
            return ""
        crc = zlib.crc32(repr(sample(flat.view(-1))).encode(), crc)
    return f"{crc:08x}"


def _parameters(model: Any) -> Iterator[torch.Tensor]:
    """The parameters of a model and its submodules, each once."""
    found = {
        id(parameter): parameter
        for module in _modules(model)
        for parameter in list(_ATTRIBUTES_OF(module).get("_parameters", {}).values())
        if type(parameter) in TENSORS
    }
    yield from found.values()


def _tensors_of(model: Any) -> list[torch.Tensor]:
    """The parameters of a model, and the buffers of all submodules."""
    buffers = [
        buffer
        for module in _modules(model)
        for buffer in list(_ATTRIBUTES_OF(module).get("_buffers", {}).values())
        if type(buffer) in TENSORS
    ]
    return [*_parameters(model), *buffers]


def _modules(model: Any) -> list[Any]:
    """A model and its submodules, each once."""
    # By identity: a module that is used in two places is one, and two may say that they are equal.
    found = {id(model): model}
    waiting = [model]
    while waiting:
        for inner in list(_ATTRIBUTES_OF(waiting.pop()).get("_modules", {}).values()):
            if safe_repr.inherits(inner, torch.nn.Module) and id(inner) not in found:
                found[id(inner)] = inner
                waiting.append(inner)
    return list(found.values())


def _optimizer(optimizer: Any) -> str:
    """An optimizer: its class, and the learning rate of each group of parameters."""
    attributes = torch.optim.Optimizer.__dict__["__dict__"].__get__(optimizer)
    groups = [group for group in attributes.get("param_groups", ()) if type(group) is dict]
    rates: list[str] = []
    for group in groups:
        rate: Any = group.get("lr")
        is_tensor = type(rate) in TENSORS and rate.device.type == "cpu" and rate.numel() == 1
        text = f"{rate.item():.6g}" if is_tensor else safe_repr.of(rate)
        rates += [text] if text not in rates else []
    more = f", … of {len(rates)}" if len(rates) > 3 else ""
    return f"{safe_repr.class_name(optimizer)}, lr {', '.join(rates[:3]) or '?'}{more}"
