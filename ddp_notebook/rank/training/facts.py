"""The summary of a run: what was trained, and on what; see `model.training`."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook import model
from ddp_notebook.rank import gpu, torch_private
from ddp_notebook.rank.collectives.observer import Observer
from ddp_notebook.rank.inspect.global_names import GlobalNames
from ddp_notebook.rank.rank_process import RankProcess
from ddp_notebook.rank.training import ddp
from ddp_notebook.rank.training.digests import Digester, named
from ddp_notebook.rank.training.fsdp_private import Sharded
from ddp_notebook.rank.training.held import variable_of
from ddp_notebook.rank.training.inputs import Samplers
from ddp_notebook.rank.training.tracker import MOST_NAMES, Replica, TrackedOptimizer, Tracker

_Of = TypeVar("_Of")


@dataclass(eq=False)
class RunSummary:
    """The facts of this rank's last run."""

    process: RankProcess
    observer: Observer
    tracker: Tracker
    samplers: Samplers
    sharded: Sharded
    names: GlobalNames

    def facts(self) -> model.RunFacts:
        """The whole summary. Only if nothing runs: it reads what the main thread would change."""
        # One digester for all, which stops after its time: parameters come first, then buffers,
        # gradients and optimizers, so that of a large model the parameters at least are compared.
        tracker, digester = self.tracker, Digester()
        replicas: list[model.ReplicaFacts] = []
        keys: dict[int, str] = {}
        for replica, key in self._used():
            wrapped, facts = replica.ref(), replica.last_facts
            if wrapped is not None:
                facts = self._facts(replica, wrapped, digester)
            if facts is not None:
                replicas.append(replace(facts, key=key))
                keys[id(replica)] = key
        meshes = {unit.mesh for unit in self.sharded.units()}
        optimizers = list(tracker.optimizers.values())
        copies = [o.copies for o in optimizers if o.copies is not None]
        held = set().union(*map(TrackedOptimizer.holds, optimizers))
        gpus: dict[str, Any] = {}
        if torch_private.uses_cuda():
            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            unique = getattr(properties, "uuid", "") or torch.cuda.current_device()
            gpus = {"gpu": str(unique), "gpus": torch.cuda.device_count()}
        observer = self.observer
        return _filled(
            model.RunFacts,
            tracker,
            digester,
            rank=self.process.rank,
            run=observer.run,
            host=socket.gethostname(),
            **gpus,
            replicas=tuple(replicas),
            optimizers=tuple(self._optimizers(keys, digester)),
            samplers=self.samplers.sampler_facts(),
            loaders=self.samplers.loader_facts(),
            works=observer.works.facts(),
            functional=observer.works.functional or model.FunctionalFacts(),
            collectives=observer.issued(),
            # Settings that change what is computed.
            precision=(
                f"torch.get_default_dtype()={torch.get_default_dtype()}",
                f"torch.get_float32_matmul_precision()={torch.get_float32_matmul_precision()}",
                f"torch.backends.cudnn.allow_tf32={torch.backends.cudnn.allow_tf32}",
                "torch.are_deterministic_algorithms_enabled()="
                f"{torch.are_deterministic_algorithms_enabled()}",
            ),
            sharded_without_optimizer=self.sharded.without(held)[:2000],
            split=replace(
                tracker.split.facts(copies),
                data_ranks=tuple(sorted(meshes.pop())) if len(meshes) == 1 else (),
            ),
            broken=tracker.broken or observer.broken,
            unrecorded=observer.unrecorded,
        )

    def counts(self) -> tuple[model.ReplicaCounts, ...]:
        """The counts of each DDP object, which may be read during a run: no tensor is."""
        return tuple(
            _filled(model.ReplicaCounts, replica, key=key, name=self._variable(replica.ref()))
            for replica, key in self._used()
        )

    def of_dying(self, wrapped: DistributedDataParallel) -> model.ReplicaFacts | None:
        """The facts of a DDP object that is being deleted; also of its optimizers' tensors."""
        replica = self.tracker.replicas.get(id(wrapped))
        if replica is None or not (replica.steps or replica.backwards):
            return None
        # The user's code waits for it, maybe in a loop that makes a model each time.
        digester = Digester(seconds=0.1, tensors=400)
        facts = self._facts(replica, wrapped, digester)
        for optimizer in list(self.tracker.optimizers.values()):
            if replica in optimizer.replicas:
                optimizer.last_digests = _tensors_of(optimizer, digester)
        return facts

    def _used(self) -> Iterator[tuple[Replica, str]]:
        """The replicas that this run trained, each with a key that is the model's on all ranks."""
        # Keys must be equal on all ranks, which share no numbers: a hash of the names and shapes,
        # and a count of the models with that hash, in the order in which they were wrapped.
        everyone = (*self.tracker.gone, *list(self.tracker.replicas.values()))
        counted: Counter[str] = Counter()
        for replica in sorted(everyone, key=lambda each: each.number):
            if replica.used:
                counted[replica.made_of] += 1
                yield replica, f"{replica.made_of} {counted[replica.made_of]}"

    def _variable(self, wrapped: Any) -> str:
        """The name of the user's variable for an object, also of `__main__`; empty without one."""
        if wrapped is None:
            return ""
        names, main = self.names.get(), vars(sys.modules.get("__main__", sys))
        return variable_of(wrapped, (names, main, getattr(names.get("main"), "__dict__", {})))

    def _facts(self, replica: Replica, wrapped: Any, digester: Digester) -> model.ReplicaFacts:
        module = wrapped.module
        named, buffers = ddp.states_of(module)
        group = wrapped.process_group
        first = next((p for _, p in named), None)
        return _filled(
            model.ReplicaFacts,
            replica,
            replica.moments,
            key="",
            name=self._variable(wrapped),
            device=str(first.device) if first is not None else "",
            backend=torch_private.group_backend(group),
            group_size=group.size(),
            hook=next(iter(torch_private.hooks_that_may_part(wrapped)), ""),
            broadcast_buffers=bool(wrapped.broadcast_buffers),
            outside=self._unmanaged(replica, named)[:MOST_NAMES],
            buffer_order=tuple(n for n, _ in buffers)[:200],
            batch_buffers=tuple(
                f"{prefix}.{name}".removeprefix(".")
                for prefix, part in module.named_modules()
                if hasattr(part, "running_mean") and hasattr(part, "running_var")
                for name, _ in part.named_buffers(recurse=False)
            )[:200],
            parameters=digester.all("parameters", named),
            buffers=digester.all("buffers", buffers),
            gradients=digester.all("gradients", ((n, p.grad) for n, p in named)),
        )

    def _unmanaged(self, replica: Replica, named: Iterable[tuple[str, Any]]) -> tuple[str, ...]:
        """Parameters that an optimizer of the model updates, and no hook reduces."""
        # The optimizer may be gone by now, with the function that made it.
        # What was unfrozen just before the object ended has had no step with it.
        updated = {
            id(parameter)
            for tracked in list(self.tracker.optimizers.values())
            for ref in (tracked.unmanaged if tracked.steps else ())
            if (parameter := ref()) is not None
            if tracked.unmanaged_trained or parameter.grad is not None
        }
        return tuple(
            name
            for name, each in named
            if each.requires_grad and id(each) in updated and not replica.knows(each)
        )

    def _optimizers(
        self, keys: dict[int, str], digester: Digester
    ) -> Iterator[model.OptimizerFacts]:
        optimizers = list(self.tracker.optimizers.values())
        counted: Counter[str] = Counter()
        for optimizer in [optimizer for optimizer in optimizers if optimizer.steps]:
            models = tuple(keys[id(r)] for r in optimizer.replicas if id(r) in keys)
            title = f"{optimizer.type} {models}"
            counted[title] += 1
            gone = optimizer.ref() is None and optimizer.last_digests
            unwrapped, states = optimizer.last_digests if gone else _tensors_of(optimizer, digester)
            several = optimizer.idle_steps or not optimizer.replicas
            yield _filled(
                model.OptimizerFacts,
                optimizer,
                optimizer.gradients,
                key=f"{title} {counted[title]}",
                lrs=tuple(as_number(lr) for lr in optimizer.lrs),
                replicas=models,
                unwrapped=unwrapped,
                state=states,
                numels=optimizer.numels[:2000] if several else (),
                idle_tensors=len(optimizer.idle) if optimizer.unheld else 0,
            )


def _filled(kind: type[_Of], *owners: object, **known: Any) -> _Of:
    """A value of the model: what is `known` of it, and else what `owners` have under that name."""
    for name in {field.name for field in fields(kind)} - known.keys():  # type: ignore[arg-type]
        for owner in owners:
            if hasattr(owner, name):
                value = getattr(owner, name)
                known[name] = tuple(value) if type(value) is list else value
    return kind(**known)


def _tensors_of(tracked: TrackedOptimizer, digester: Digester) -> tuple[Any, Any]:
    # What never had a gradient is not trained, whatever it is on each rank.
    idle = set(map(id, tracked.idle))
    living = [(name, ref()) for name, ref in tracked.unwrapped if id(ref) not in idle]
    unwrapped = digester.all("parameters without DDP", living)
    optimizer = tracked.ref() if tracked.replicas else None
    if optimizer is None:  # there is nothing to compare
        return unwrapped, ()
    states = (
        (f"{name} of {place}", value)
        for place, parameter in named(optimizer.param_groups)
        for name, value in optimizer.state.get(parameter, {}).items()
    )
    return unwrapped, digester.all("optimizer states", list(states))


def as_number(value: Any) -> float | None:
    """Return a number, or the one in a tensor; None for anything else, and while its GPU works."""
    if isinstance(value, torch.Tensor) and not gpu.is_readable(value):
        return None
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        return float(value)
    return None
