"""One model on all ranks: its replicas, and the tensors in which they differ."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from ddp_notebook.model import (
    Collective,
    Collectives,
    OptimizerFacts,
    ReplicaFacts,
    RunFacts,
    TensorDigest,
)

_ROUNDING = 2e-6
"""A relative difference that replicas on unlike machines may have by rounding."""
_FEW_METRICS = 8
AVERAGING = frozenset(
    {
        *("all_reduce", "all_reduce_coalesced", "reduce", "broadcast"),
        *("reduce_scatter", "reduce_scatter_tensor", "all_gather", "all_gather_into_tensor"),
        *("all_to_all", "all_to_all_single"),
    }
)


@dataclass(frozen=True)
class Model:
    """One model and its replicas, by rank of the session."""

    of: Mapping[int, ReplicaFacts]

    @property
    def first(self) -> ReplicaFacts:
        """The replica of the lowest rank."""
        return self.of[min(self.of)]

    @property
    def title(self) -> str:
        """The name for a reader: the variable, or the class."""
        if not self.first.parameters and not self.first.device and not self.first.name:
            return f"the model {self.first.type}"  # nothing wraps it
        return self.first.name or f"the DistributedDataParallel of {self.first.type}"

    @property
    def whole(self) -> bool:
        """All ranks with it are one group, so that their replicas must be equal."""
        return all(replica.group_size == len(self.of) for replica in self.of.values())

    @property
    def diverged(self) -> tuple[str, ...]:
        """Parameters that are not the same on all ranks, though they must be."""
        if not self.whole or len(self.of) < 2:
            return ()
        return differing({rank: replica.parameters for rank, replica in self.of.items()})

    @property
    def broken(self) -> tuple[str, ...]:
        """Parameters with values that are not finite, on any rank."""
        found = [d.name for replica in self.of.values() for d in replica.parameters if not d.finite]
        return tuple(dict.fromkeys(found))


def models(facts: Mapping[int, RunFacts]) -> dict[str, Model]:
    """The models of a run that were trained, by key."""
    return _by_key({rank: facts[rank].replicas for rank in sorted(facts)})


def evaluated_models(facts: Mapping[int, RunFacts]) -> list[Model]:
    """The models that a run evaluated alone, on all ranks from one line on."""
    found = _by_key({rank: facts[rank].evaluated for rank in sorted(facts)}).values()
    return [e for e in found if len({r.evaluations[0].place for r in e.of.values()}) == 1]


def _by_key(replicas: Mapping[int, Iterable[ReplicaFacts]]) -> dict[str, Model]:
    found: dict[str, dict[int, ReplicaFacts]] = {}
    for rank, own in replicas.items():
        for replica in own:
            found.setdefault(replica.key, {})[rank] = replica
    return {key: Model(of) for key, of in found.items()}


def differing(tensors: Mapping[int, Iterable[TensorDigest]]) -> tuple[str, ...]:
    """Names of tensors that all ranks have and that are not the same on all of them."""
    named = [{digest.name: digest for digest in of} for of in tensors.values()]
    first, others = named[0], named[1:]
    return tuple(
        name
        for name, mine in first.items()
        if all(name in other for other in others)
        and any(differ(mine, other[name]) for other in others)
    )


def differ(a: TensorDigest, b: TensorDigest) -> bool:
    """True when two tensors are not the same, beyond what rounding makes of it."""
    if a.numel != b.numel or a.finite != b.finite:
        return True
    if not a.finite or (a.hash and a.hash == b.hash):
        return False
    if a.norm is None or b.norm is None:
        return a.hash != b.hash or a.sample != b.sample
    largest = max(a.norm, b.norm)
    usual = largest / math.sqrt(max(1, a.numel))
    return abs(a.norm - b.norm) > _ROUNDING * largest or any(
        x is not None and y is not None and abs(x - y) > _ROUNDING * max(usual, abs(x), abs(y))
        for x, y in zip(a.sample, b.sample, strict=False)
    )


def by_hand(model: Model, collectives: Collectives) -> bool:
    """The ranks exchange what has the size of this model's parameters, without DDP."""
    sizes = {digest.numel for digest in model.first.parameters}
    sizes.add(sum(digest.numel for digest in model.first.parameters))
    return any(
        record.part is None
        and record.operation in AVERAGING
        and (record.numel in sizes or record.tensors > 1)
        and record.numel > 1
        for records in collectives.of.values()
        for record in records
    )


def exchanged(collectives: Collectives, of: Mapping[int, OptimizerFacts]) -> bool:
    """All these ranks exchange what has the size of the tensors that their optimizers hold."""
    return [set(part) for part in exchanging(collectives, of)] == [set(of)]


def exchanging(
    collectives: Collectives, of: Mapping[int, OptimizerFacts]
) -> list[dict[int, OptimizerFacts]]:
    """The ranks that exchange what has the size of the tensors that these optimizers hold.

    Those of groups that have no rank in common train apart. All, where nothing is known of what
    they sent: then the answer is asked for again when it is.
    """
    if not collectives.of:
        return [dict(of)]
    sizes = {
        numel for optimizer in of.values() for numel in (*optimizer.numels, sum(optimizer.numels))
    } - {1}
    parts: list[set[int]] = []
    for rank in of:
        for group in _groups_for(collectives, rank, sizes):
            met = {rank, *(set(collectives.groups.get(group, of)) & set(of))}
            overlapping = [part for part in parts if not part.isdisjoint(met)]
            parts = [part for part in parts if part.isdisjoint(met)]
            parts.append(met.union(*overlapping))
    return [{rank: of[rank] for rank in sorted(part)} for part in parts]


def _groups_for(collectives: Collectives, rank: int, sizes: Collection[int]) -> set[str]:
    """The groups in which a rank exchanges by hand what has one of these sizes."""
    return {
        r.group
        for r in collectives.of.get(rank, ())
        if (r.numel in sizes or r.tensors > 1) and r.part is None and r.operation in AVERAGING
    }


def may_have_joined(
    collectives: Collectives, ranks: Iterable[int], numels: Collection[int]
) -> bool:
    """Once training had begun, ranks sent by hand what may hold tensors of these sizes.

    Or what is computed with them: anything larger than a few metrics.
    """
    return any(
        r.part is None and r.backwards and (r.numel > 1) and _may_hold(r, numels)
        for rank in ranks
        for r in collectives.of.get(rank, ())
    )


def _may_hold(record: Collective, numels: Collection[int]) -> bool:
    if record.dtype.endswith("uint8"):  # an object: its values take two bytes each, or more
        return record.numel >= 2 * sum(numels)
    return record.numel > _FEW_METRICS or record.numel in numels


def some(names: Iterable[str], most: int = 3) -> str:
    """The first of some names: ``b.weight, b.bias and 4 more``."""
    found = list(names)
    if len(found) <= most + 1:
        return " and ".join([", ".join(found[:-1]), found[-1]]) if len(found) > 1 else found[0]
    return f"{', '.join(found[:most])} and {len(found) - most} more"
