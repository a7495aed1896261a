"""One model on all ranks: its replicas, and the tensors in which they differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ddp_notebook.diagnosis.majority import by_ranks
from ddp_notebook.model import (
    Collective,
    Collectives,
    EvaluationFacts,
    OptimizerFacts,
    Place,
    Ranks,
    ReplicaFacts,
    RunFacts,
    TensorDigest,
    name_ranks,
)

_ROUNDING = 2e-6
"""A relative difference that replicas on unlike machines may have by rounding."""
_FEW_METRICS = 8
_LONGEST_NAMES = 36
"""So many characters of names have room in a title."""
AVERAGING = frozenset(
    {
        *("all_reduce", "all_reduce_coalesced", "reduce", "broadcast"),
        *("reduce_scatter", "reduce_scatter_tensor", "all_gather", "all_gather_into_tensor"),
        *("all_to_all", "all_to_all_single"),
    }
)


class Keyed(Protocol):
    """A thing that each rank has one of, under the same key."""

    @property
    def key(self) -> str: ...


_Keyed = TypeVar("_Keyed", bound=Keyed)
_T = TypeVar("_T")


@dataclass(frozen=True)
class Model:
    """One model and its replicas, by rank of the session."""

    of: Mapping[int, ReplicaFacts]

    @property
    def key(self) -> str:
        """The key by which optimizers know it."""
        return self.first.key

    @property
    def first(self) -> ReplicaFacts:
        """The replica of the lowest rank."""
        return self.of[min(self.of)]

    def ranks_of(self, of: Mapping[int, _T]) -> dict[int, _T]:
        """Return what its ranks have of what all may have."""
        return {rank: each for rank, each in of.items() if rank in self.of}

    @property
    def title(self) -> str:
        """The name for a reader: the variable, or the class."""
        return f"`{self.first.name or f'DDP({self.first.type})'}`"

    @property
    def whole(self) -> bool:
        """All ranks with it are one group, so that their replicas must be equal."""
        return all(replica.group_size == len(self.of) for replica in self.of.values())

    @property
    def replicated(self) -> bool:
        """Several ranks have it, and are one group."""
        return self.whole and len(self.of) > 1

    @property
    def sends_buffers(self) -> bool:
        """DDP sends rank 0's buffers to the others before each forward."""
        return any(replica.broadcast_buffers for replica in self.of.values())

    @property
    def diverged(self) -> tuple[str, ...]:
        """Parameters that are not the same on all ranks, though they must be."""
        of = {rank: replica.parameters for rank, replica in self.of.items()}
        return differing(of) if self.replicated else ()

    @property
    def apart(self) -> tuple[str, ...]:
        """That the replicas differ, as a line of evidence; none when they do not."""
        names = self.diverged
        return (f"differ between {name_ranks(self.of)}: {some(names)}",) if names else ()

    def place_of(self, ranks: Ranks, which: Callable[[ReplicaFacts], Place | None]) -> Place | None:
        """Return the first known place of these ranks."""
        return next((p for r in ranks if (p := which(self.of[r])) is not None), None)

    def counts(self, ranks: Iterable[int], text: Callable[[ReplicaFacts], str]) -> tuple[str, ...]:
        """Return what a replica of each of these ranks has counted, as lines of evidence."""
        return by_ranks({rank: self.of[rank] for rank in ranks}, text)

    @property
    def broken(self) -> tuple[str, ...]:
        """Parameters with values that are not finite, on any rank."""
        found = [d.name for replica in self.of.values() for d in replica.parameters if not d.finite]
        return tuple(dict.fromkeys(found))


def models(facts: Mapping[int, RunFacts]) -> tuple[Model, ...]:
    """Return the models of a run that were trained.

    Those that ranks reduce in several groups, each its own (``process_group=``), are as many models
    under one key: nothing makes them equal.
    """
    found = []
    for of in by_key(facts, lambda run: run.replicas).values():
        groups = {replica.group for replica in of.values()}
        members = [rank for group in groups for rank in group]
        if len(groups) < 2 or sorted(members) != sorted(of):
            found.append(Model(of))  # one group, or groups that are not known any more
            continue
        found += [Model({rank: of[rank] for rank in group}) for group in sorted(groups)]
    return tuple(found)


def optimizers(facts: Mapping[int, RunFacts]) -> dict[str, dict[int, OptimizerFacts]]:
    """Return the optimizers of a run, by key, then by rank."""
    return by_key(facts, lambda run: run.optimizers)


def by_key(
    facts: Mapping[int, RunFacts], which: Callable[[RunFacts], Iterable[_Keyed]]
) -> dict[str, dict[int, _Keyed]]:
    """Return what ranks have under one key, by rank: equal keys are one thing on all of them."""
    found: dict[str, dict[int, _Keyed]] = {}
    for rank in sorted(facts):
        for each in which(facts[rank]):
            found.setdefault(each.key, {})[rank] = each
    return found


def differing(tensors: Mapping[int, Iterable[TensorDigest]]) -> tuple[str, ...]:
    """Names of tensors that all ranks have and that are not the same on all of them."""
    first, *others = ({digest.name: digest for digest in of} for of in tensors.values())
    shared = [name for name in first if all(name in other for other in others)]
    return tuple(name for name in shared if differ(first[name], *(of[name] for of in others)))


def differ(a: TensorDigest, *others: TensorDigest) -> bool:
    """True when tensors are not the same, beyond what rounding makes of it."""
    # Equal hashes end it; other hashes prove nothing, since ranks on unlike machines round sums in
    # another order. So norms and samples decide, where there are some, by what rounding may do.
    for b in others:
        if a.numel != b.numel or a.finite != b.finite:
            return True
        if not a.finite or (a.hash and a.hash == b.hash):
            continue
        if a.norm is None or b.norm is None:
            if a.hash != b.hash or a.sample != b.sample:
                return True
            continue
        largest = max(a.norm, b.norm)
        usual = largest / math.sqrt(max(1, a.numel))
        if abs(a.norm - b.norm) > _ROUNDING * largest or any(
            x is not None and y is not None and abs(x - y) > _ROUNDING * max(usual, abs(x), abs(y))
            for x, y in zip(a.sample, b.sample, strict=False)
        ):
            return True
    return False


def by_hand(model: Model, collectives: Collectives) -> bool:
    """The ranks exchange what has the size of this model's parameters, without DDP."""
    sizes = flat_sizes([[digest.numel for digest in model.first.parameters]])
    return any(
        _averages(record, sizes) for records in collectives.of.values() for record in records
    )


def flat_sizes(held: Iterable[Sequence[int]]) -> set[int]:
    """Return the sizes of tensors, and of all those of a list in one flat tensor."""
    return {numel for numels in held for numel in (*numels, sum(numels))}


def _averages(record: Collective, sizes: Collection[int]) -> bool:
    """True of a call by hand that averages one tensor of these sizes, or several tensors."""
    # By sizes: what code averages has the size of a parameter, or of all in one flat tensor. A loss
    # or a metric has one value, and proves nothing.
    fits = record.numel > 1 and (record.numel in sizes or record.tensors > 1)
    return fits and record.part is None and record.operation in AVERAGING


def exchanging(
    collectives: Collectives, of: Mapping[int, OptimizerFacts]
) -> list[dict[int, OptimizerFacts]]:
    """The ranks that exchange what has the size of the tensors that these optimizers hold.

    Those of groups that have no rank in common train apart. All, where nothing is known of what
    they sent: then the answer is asked for again when it is.
    """
    if not collectives.of:
        return [dict(of)]
    sizes = flat_sizes(optimizer.numels for optimizer in of.values())
    # Groups that share a rank train together: a mesh's rows join through its columns.
    parts: list[set[int]] = []
    for rank in of:
        for group in {r.group for r in collectives.of.get(rank, ()) if _averages(r, sizes)}:
            met = {rank, *(set(collectives.groups.get(group, of)) & set(of))}
            overlapping = [part for part in parts if not part.isdisjoint(met)]
            parts = [part for part in parts if part.isdisjoint(met)]
            parts.append(met.union(*overlapping))
    return [{rank: of[rank] for rank in sorted(part)} for part in parts]


def may_have_joined(
    collectives: Collectives, ranks: Iterable[int], numels: Collection[int]
) -> bool:
    """Once training had begun, ranks sent by hand what may hold tensors of these sizes.

    Or what is computed with them: anything larger than a few metrics.
    """
    fewest_of_object = 2 * sum(numels)  # its values take two bytes each, or more
    calls = (r for rank in ranks for r in collectives.of.get(rank, ()) if r.part is None)
    return any(
        r.numel >= fewest_of_object
        if r.dtype.endswith("uint8")
        else r.numel > _FEW_METRICS or r.numel in numels
        for r in calls
        if r.backwards and r.numel > 1
    )


def some(names: Iterable[str], most: int = 3) -> str:
    """The first of some names: ``b.weight, b.bias and 4 more``."""
    found = list(names)
    if len(found) <= most + 1:
        return " and ".join([", ".join(found[:-1]), found[-1]]) if len(found) > 1 else found[0]
    return f"{', '.join(found[:most])} and {len(found) - most} more"


def evaluated_together(model: Model) -> list[dict[int, EvaluationFacts]]:
    """Return the evaluations that all ranks made after as many backwards.

    None unless all made as many evaluations.
    """
    of = {rank: replica.evaluations for rank, replica in model.of.items()}
    if len(of) < 2 or len({len(each) for each in of.values()}) != 1:
        return []
    rows = [dict(zip(of, row, strict=True)) for row in zip(*of.values(), strict=True)]
    return [row for row in rows if len({each.backwards for each in row.values()}) == 1]


def named(names: Iterable[str], most: int = 3) -> tuple[str, ...]:
    """Return the first of some names as code, and how many more there are, for a title."""
    found = [f"`{name}`" for name in names]
    shown = most if len(found) > most + 1 else len(found)
    while True:
        rest = [f"{len(found) - shown} more"] if shown < len(found) else []
        some_of = (*found[:shown], *rest)
        if shown <= 1 or len(", ".join(some_of)) <= _LONGEST_NAMES:
            return some_of
        shown -= 1
