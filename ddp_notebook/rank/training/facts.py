"""The facts of a run, gathered when it is over: `model.facts` says what they are."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from IPython.core.getipython import get_ipython
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.model import OptimizerFacts, Place, ReplicaFacts, RunFacts, codec
from ddp_notebook.rank import state, torch_private
from ddp_notebook.rank.collectives import observer
from ddp_notebook.rank.training.data_parallel import parallels
from ddp_notebook.rank.training.digests import Digester
from ddp_notebook.rank.training.replicas import Replica, Stepped, tracker
from ddp_notebook.rank.training.samplers import sources

_DYING_SECONDS, _DYING_TENSORS = 0.1, 400
_MOST_NAMES = 40


def gather() -> dict[str, Any]:
    """This rank's facts as JSON. Only when nothing runs: it reads what main would change."""
    digester = Digester()
    replicas = _replicas(digester)
    keys = {id(replica): facts.key for replica, facts in replicas}
    found = RunFacts(
        rank=state.current.rank,
        run=observer.observer.run,
        host=socket.gethostname(),
        gpu=_gpu(),
        gpus=torch.cuda.device_count() if torch_private.uses_cuda() else 0,
        local_rank=_local_rank(),
        backwards=tracker.backwards,
        nan_backward=tracker.nan_backward,
        nan_what=tracker.nan_what,
        nan_place=_place(tracker.nan_place),
        replicas=tuple(facts for _, facts in replicas),
        optimizers=tuple(_optimizers(keys, digester)),
        samplers=sources.sampler_facts(),
        loaders=sources.loader_facts(),
        parallels=parallels.facts(digester),
    )
    broken = [f"counting stopped: {tracker.broken}"] if tracker.broken else []
    wire: dict[str, Any] = codec.encode(replace(found, notes=(*digester.notes, *broken)))
    return wire


def of_dying(wrapped: DistributedDataParallel) -> ReplicaFacts | None:
    """What to keep of a DDP object that is about to go; also of what its optimizers have."""
    replica = tracker.replicas.get(id(wrapped))
    if replica is None or not replica.steps or state.current.rank < 0:
        return None
    digester = Digester(_DYING_SECONDS, _DYING_TENSORS)
    facts = _facts(replica, wrapped, digester)
    for stepped in list(tracker.optimizers.values()):
        if replica in stepped.replicas:
            stepped.kept = _tensors_of(stepped, digester)
    return facts


def _place(place: tuple[str, int, str, str] | None) -> Place | None:
    return Place(*place) if place else None


def counts() -> tuple[ReplicaFacts, ...]:
    """What was counted of each DDP object, and no tensors: safe and quick whatever main does."""
    return tuple(facts for _, facts in _replicas(None))


def _replicas(digester: Digester | None) -> list[tuple[Replica, ReplicaFacts]]:
    """Those that this run used, each with a key that the same model has on other ranks."""
    everyone = (*tracker.gone, *list(tracker.replicas.values()))
    counted: Counter[str] = Counter()
    found = []
    for replica in sorted(everyone, key=lambda each: each.number):
        if not replica.used:
            continue
        counted[replica.made_of] += 1
        key = f"{replica.made_of} {counted[replica.made_of]}"
        wrapped = replica.ref()
        if digester is None:
            facts = _counts(replica, wrapped)
        else:
            facts = replica.kept if wrapped is None else _facts(replica, wrapped, digester)
        if facts is not None:
            found.append((replica, replace(facts, key=key)))
    return found


def _counts(replica: Replica, wrapped: Any) -> ReplicaFacts:
    return ReplicaFacts(
        key="",
        type=replica.type,
        name=_variable(wrapped) if wrapped is not None else "",
        forwards=replica.forwards,
        no_sync_forwards=replica.no_sync_forwards,
        bypasses=replica.bypasses,
        bypass_place=_place(replica.bypass_place),
        local_place=_place(replica.local_place),
        backwards=replica.backwards,
        steps=replica.steps,
        local_steps=replica.local_steps,
        bypassed_steps=replica.bypassed_steps,
        unready_steps=replica.unready_steps,
        bad_place=_place(replica.bad_place),
        unready=replica.unready[:_MOST_NAMES],
    )


def _facts(replica: Replica, wrapped: Any, digester: Digester) -> ReplicaFacts:
    module = wrapped.module
    ignored = set(getattr(wrapped, "parameters_to_ignore", ()))
    named = [(n, p) for n, p in module.named_parameters() if n not in ignored]
    buffers = [(n, b) for n, b in module.named_buffers() if n not in ignored]
    group = wrapped.process_group
    first = next((p for _, p in named), None)
    return replace(
        _counts(replica, wrapped),
        device=str(first.device) if first is not None else "",
        backend=torch_private.group_backend(group),
        group_size=group.size(),
        find_unused=bool(wrapped.find_unused_parameters),
        broadcast_buffers=bool(wrapped.broadcast_buffers),
        outside=_outside(replica, named)[:_MOST_NAMES],
        buffer_order=tuple(n for n, _ in buffers)[:200],
        batch_buffers=tuple(_batch_buffers(module))[:200],
        parameters=digester.all("parameters", named),
        buffers=digester.all("buffers", buffers),
        gradients=digester.all("gradients", ((n, p.grad) for n, p in named)),
    )


def _outside(replica: Replica, named: Iterable[tuple[str, Any]]) -> tuple[str, ...]:
    """Parameters that an optimizer of the model updates, and no hook reduces."""
    updated = {
        id(parameter)
        for stepped in list(tracker.optimizers.values())
        if stepped.steps and (optimizer := stepped.ref()) is not None
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return tuple(
        name
        for name, each in named
        if each.requires_grad and id(each) in updated and not replica.knows(each)
    )


def _batch_buffers(module: torch.nn.Module) -> Iterator[str]:
    for prefix, part in module.named_modules():
        if hasattr(part, "running_mean") and hasattr(part, "running_var"):
            for name, _ in part.named_buffers(recurse=False):
                yield f"{prefix}.{name}".removeprefix(".")


def _variable(wrapped: Any) -> str:
    """The name of the user's variable for an object."""
    spaces = [get_ipython().user_ns, vars(sys.modules.get("__main__", sys))]
    main = spaces[0].get("main")
    if main is not None:
        spaces.append(getattr(main, "__dict__", {}))
    for space in spaces:
        for name, value in list(space.items()):
            if value is wrapped and not name.startswith("_"):
                return str(name)
    return ""


def _optimizers(keys: dict[int, str], digester: Digester) -> Iterator[OptimizerFacts]:
    used = [each for each in list(tracker.optimizers.values()) if each.steps and each.replicas]
    counted: Counter[str] = Counter()
    for stepped in used:
        models = tuple(keys[id(r)] for r in stepped.replicas if id(r) in keys)
        title = f"{stepped.type} {models}"
        counted[title] += 1
        unwrapped, states = (
            stepped.kept
            if stepped.ref() is None and stepped.kept
            else _tensors_of(stepped, digester)
        )
        yield OptimizerFacts(
            key=f"{title} {counted[title]}",
            type=stepped.type,
            steps=stepped.steps,
            lrs=tuple(_number(lr) for lr in stepped.lrs),
            replicas=models,
            unwrapped=unwrapped,
            state=states,
            place=_place(stepped.place),
        )


def _tensors_of(stepped: Stepped, digester: Digester) -> tuple[Any, Any]:
    living = [(name, ref()) for name, ref in stepped.unwrapped]
    unwrapped = digester.all("parameters without DDP", living)
    optimizer = stepped.ref()
    states = [] if optimizer is None else list(_states(optimizer))
    return unwrapped, digester.all("optimizer states", states)


def _states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            for name, value in optimizer.state.get(parameter, {}).items():
                yield f"{name} of param_groups[{g}]['params'][{i}]", value


def _number(value: Any) -> float | None:
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        return float(value)
    return None


def _gpu() -> str:
    if not torch_private.uses_cuda():
        return ""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return str(getattr(properties, "uuid", "") or torch.cuda.current_device())


def _local_rank() -> int | None:
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if text.isdecimal() else None
