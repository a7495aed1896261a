"""Rules about what the ranks came with: values that differ, cannot work, or are taken twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ddp_notebook.analysis import failures, odd
from ddp_notebook.model import (
    Category,
    Finding,
    RankEvidence,
    Ranks,
    SetupCase,
    format_ranks,
    name_ranks,
)

# -- what the ranks came with ------------------------------------------------------------


def invalid_values(case: SetupCase) -> Iterator[Finding]:
    """A value that cannot work anywhere."""
    for finding in failures.of_category(case, Category.ENV_INVALID):
        if not _all_mean_fewer(case):
            yield finding


def _all_mean_fewer(case: SetupCase) -> bool:
    """Every rank came with the same WORLD_SIZE, and it is not the number of processes."""
    sizes = {e.arguments.world_size for e in case.came}
    return len(sizes) == 1 and case.world_size not in sizes and None not in sizes


def duplicate_ranks(case: SetupCase) -> Iterator[Finding]:
    """Two processes claim one rank."""
    claims: dict[int, list[int]] = {}
    for e in case.came:
        if e.arguments.rank is not None and _same_world(e, case):
            claims.setdefault(e.arguments.rank, []).append(e.rank)
    for claimed, ranks in sorted(claims.items()):
        if len(ranks) < 2:
            continue
        culprits = tuple(rank for rank in ranks if rank != claimed)
        absent = sorted(set(range(case.world_size)) - claims.keys())
        nobody = f"; nobody is rank {format_ranks(absent)}" if absent else ""
        yield Finding(
            Category.DUPLICATE_RANK,
            culprits,
            f"{_processes(ranks)} both say RANK={claimed}{nobody}",
            f"Give each process its own RANK: {_own_ranks(culprits)}.",
            case.waiting,
            tuple(
                f"the process launched as rank {rank} came with RANK={claimed}" for rank in ranks
            ),
        )


def _same_world(evidence: RankEvidence, case: SetupCase) -> bool:
    told = case.told.get("WORLD_SIZE", "")
    size = evidence.arguments.world_size
    return size is None or not told or str(size) == told


def _processes(ranks: list[int]) -> str:
    return f"The processes launched as {name_ranks(ranks)}"


def _own_ranks(ranks: Ranks) -> str:
    return ", ".join(f"RANK={rank} on rank {rank}" for rank in ranks)


def differing_values(case: SetupCase) -> Iterator[Finding]:
    """MASTER_ADDR, MASTER_PORT, WORLD_SIZE, the backend or the method differ between ranks."""
    came = case.came
    for name, value_of in odd.VALUES.items():
        values = {e.rank: value for e in came if (value := value_of(e))}
        if len(set(values.values())) < 2:
            continue
        right, culprits = odd.odd_ones(values, case.told.get(name, ""), case.store_host)
        others = tuple(rank for rank in values if rank not in culprits)
        yield Finding(
            Category.ENV_MISMATCH,
            culprits,
            f"{name} is {_each(values, culprits)}, but {right} on {name_ranks(others)}",
            f"Set {odd.assignment(name, right)} on {name_ranks(culprits)}.",
            case.waiting,
            tuple(f"rank {rank}: {name}={value}" for rank, value in sorted(values.items())),
        )


def _each(values: Mapping[int, str], ranks: Ranks) -> str:
    """What these ranks have: one value, or each its own."""
    found = {values[rank] for rank in ranks}
    if len(found) == 1:
        return f"{found.pop()} on {name_ranks(ranks)}"
    return ", ".join(f"{values[rank]} on rank {rank}" for rank in ranks)


def wrong_world_size(case: SetupCase) -> Iterator[Finding]:
    """All ranks expect another number of ranks than there are processes."""
    came = case.came
    if not came or not _all_mean_fewer(case):
        return
    size = came[0].arguments.world_size
    yield Finding(
        Category.WORLD_SIZE_MISMATCH,
        tuple(e.rank for e in came),
        f"The ranks expect {size} ranks, but there are {case.world_size} processes",
        f"Take WORLD_SIZE from the launcher's environment ({case.world_size}), "
        "or start as many processes as ranks.",
        case.waiting,
        tuple(f"rank {e.rank}: world_size={size}" for e in came),
    )


def other_versions(case: SetupCase) -> Iterator[Finding]:
    """torch or Python differ between ranks."""
    for name in ("torch", "python"):
        values = {e.rank: e.versions[name] for e in case.ranks if e.versions.get(name)}
        if len(set(values.values())) < 2:
            continue
        right, culprits = odd.odd_ones(values, "", 0)
        yield Finding(
            Category.VERSION_MISMATCH,
            culprits,
            f"{name} is {values[culprits[0]]} on {name_ranks(culprits)}, but {right} elsewhere",
            f"Install {name} {right} for every rank.",
            case.waiting,
            tuple(f"rank {rank}: {name} {value}" for rank, value in sorted(values.items())),
        )


# -- DDP ---------------------------------------------------------------------------------


def differing_models(case: SetupCase) -> Iterator[Finding]:
    """The models that ranks wrap differ in number, order, shape or dtype of their tensors."""
    models = {e.rank: repr(e.tensors) for e in case.ranks if e.tensors}
    if len(set(models.values())) < 2:
        return
    right, culprits = odd.odd_ones(models, "", 0)
    good = next(e for e in case.ranks if models.get(e.rank) == right)
    bad = next(e for e in case.ranks if e.rank == culprits[0])
    yield Finding(
        Category.PARAM_MISMATCH,
        culprits,
        odd.first_difference(bad, good),
        "Build the same model on every rank: the same arguments, the same order of layers.",
        case.waiting,
        (f"rank {bad.rank} has {len(bad.tensors)} tensors, rank {good.rank} {len(good.tensors)}",),
    )
