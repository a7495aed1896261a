"""The variables of a rank by scope: those of the function that the main thread is in, global ones.

Numbers, tensors, models and optimizers are described; anything else is a short text. Called on the
thread that answers: nothing here waits, imports, or runs code of the user's. What a model or an
optimizer holds is read from where torch's own base class keeps it, and not by its methods.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
import zlib
from dataclasses import replace
from types import FrameType
from typing import Any

import torch

from ddp_notebook.model import Activity, RankVariables, Scope, Variable, codec
from ddp_notebook.rank.calls import VariablesRequest
from ddp_notebook.rank.inspect import frames as stack_frames
from ddp_notebook.rank.inspect import safe_repr
from ddp_notebook.rank.inspect.frames import UserCode
from ddp_notebook.rank.inspect.global_names import GlobalNames
from ddp_notebook.rank.inspect.process import is_runnable
from ddp_notebook.rank.inspect.safe_repr import TENSORS
from ddp_notebook.rank.inspect.stacks import LONGEST_NAME, NOT_SHOWN, values_of
from ddp_notebook.rank.inspect.tensor_values import TensorReader, flattened, sample
from ddp_notebook.rank.inspect.value_digests import Digester
from ddp_notebook.rank.inspect.waiting import Waiting
from ddp_notebook.rank.main_thread import MainThread
from ddp_notebook.rank.rank_process import RankProcess
from ddp_notebook.rank.training.fsdp_private import placed_part

MOST_BYTES = 60_000
"""The largest answer of a rank, as JSON."""
_IPYTHONS = {"In", "Out", "exit", "quit", "get_ipython"}
# The getter of `__dict__` itself, in place of `model.__dict__`: a class of the user's may define
# `__getattribute__`, or a property of that name, and its code would run here, on our thread.
_ATTRIBUTES_OF = torch.nn.Module.__dict__["__dict__"].__get__


class Variables:
    """Reads this rank's variables while its main thread continues."""

    def __init__(
        self,
        process: RankProcess,
        waiting: Waiting,
        main_thread: MainThread,
        user_code: UserCode,
        names: GlobalNames,
    ) -> None:
        self._rank = process.rank
        self._waiting = waiting
        self._user_code = user_code
        self._main_thread = main_thread
        self._names = names

    def variables(self, request: VariablesRequest) -> RankVariables:
        """This rank's variables, in at most `MOST_BYTES` as JSON."""
        stack, is_busy = self._stands()
        frame, _ = self._user_code.innermost(stack)
        if frame is None:  # a cell with top-level await, which is on no stack
            awaiting = list(stack_frames.task_frames(self._main_thread.task))
            frame, _ = self._user_code.innermost(awaiting[::-1])
        busy = is_busy and frame is not None

        users, hidden = self._names.get(), self._names.hidden
        names = users if frame is None else frame.f_globals
        function = file = ""
        if frame is not None:
            function = stack_frames.own_name(frame.f_code)[-LONGEST_NAME:]
            path = stack_frames.file_shown(frame.f_code.co_filename)
            file = path.rpartition("/")[2][-LONGEST_NAME:]
        groups: list[tuple[str, str, list[tuple[str, Any]]]] = []
        if frame is not None and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            traced = any(f.f_globals.get("__name__") == "bdb" for f in stack)
            groups.append((function, file, values_of(frame, keep=traced)))
        # What the user has bound: what `%who` would list.
        unbound = object()
        own = [
            (name, value)
            for name, value in list(names.items())
            if name not in _IPYTHONS and value is not hidden.get(name, unbound)
        ]
        groups.append(("", "" if names is users else file, own))

        reader, digester = TensorReader(values=not busy), Digester(objects=False)
        left = MOST_BYTES - 500  # for what is around the variables
        scopes = []
        for function, file, found in groups:
            wanted = [
                (name, value)
                for name, value in found
                if type(name) is str
                and name[:1] != "_"
                and not issubclass(type(value), NOT_SHOWN)  # a definition, or an import
                and name in (request.names or (name,))
            ]
            # The newest ones: what a cell has just bound is what the user asks for. They share one
            # reader and one digester, so that their time is that of the whole answer.
            kept = []
            # The most variables of one scope, the newest ones.
            for name, value in wanted[-100:]:
                variable = describe(name[:LONGEST_NAME], value, reader, None if busy else digester)
                left -= len(json.dumps(codec.encode(variable))) + 2
                if left < 0:
                    break
                kept.append(variable)
            scopes.append(Scope(function, file, tuple(kept), len(wanted) - len(kept)))
        return RankVariables(self._rank, tuple(scopes), busy)

    def standing(self) -> tuple[list[tuple[FrameType, int]], bool]:
        """The user's frames where the rank is, the innermost first; whether it computes there.

        Of a rank that does nothing and has raised: those that the error has left.
        """
        stack, busy = self._stands()
        is_users = self._user_code.is_users
        own = [(f, f.f_lineno) for f in stack if is_users(f.f_code.co_filename)]
        error = self._main_thread.error
        if not own and error is not None:
            return stack_frames.raised_in(error.trace, is_users), False
        return own, busy

    def _stands(self) -> tuple[list[FrameType], bool]:
        """The main thread's stack, and whether it computes."""
        awaited = self._waiting.awaited()
        inside = self._waiting.wait(awaited, is_runnable()).inside
        return awaited.stack, self._waiting.activity(inside) is Activity.BUSY


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
    whole = _tensors_of(value, "_parameters", "_buffers") if is_model else value
    digest = digester.of(whole)
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
    if safe_repr.is_array(value):
        return Variable(name, tensor=reader.array_facts(value))
    if numpy is not None and kind in {numpy.dtype(code).type for code in "?bBhHiIlLqQefdFD"}:
        return _described(name, value.item(), reader)  # a number of NumPy's that is one of Python's
    return Variable(name, safe_repr.of(value))


def _model(name: str, model: Any) -> Variable:
    """A model: its class, how many parameters, how many of them do not train, whether it does."""
    attributes, parameters = _ATTRIBUTES_OF(model), _tensors_of(model, "_parameters")
    count = sum(parameter.numel() for parameter in parameters)
    frozen = sum(tensor.numel() for tensor in parameters if not tensor.requires_grad)
    size = f"{count:,} parameters{f' ({frozen:,} frozen)' if frozen else ''}"
    mode = "train" if attributes.get("training") is True else "eval"
    kind, inner = safe_repr.class_name(model), attributes.get("_modules", {}).get("module")
    if type(model) is torch.nn.parallel.DistributedDataParallel and inner is not None:
        kind = f"DDP({safe_repr.class_name(inner)})"
    # Of some values of the first parameters: of a large model there is no other. Empty where they
    # cannot be read: on a GPU, in parts.
    read = [flattened(parameter.detach()) for parameter in parameters[:200]]
    samples = [sample(values) for values in read if values is not None]
    digest = f"{zlib.crc32(repr(samples).encode()):08x}" if len(samples) == len(read) else ""
    return Variable(name, f"{kind}, {size}, {mode}", digest=digest)


def _tensors_of(model: Any, *kinds: str) -> list[torch.Tensor]:
    """Return what a model and its submodules hold in these dicts, each tensor once."""
    found = {
        id(tensor): tensor
        for kind in kinds
        for module in _modules(model)
        for tensor in list(_ATTRIBUTES_OF(module).get(kind, {}).values())
        if type(tensor) in TENSORS
    }
    return list(found.values())


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
