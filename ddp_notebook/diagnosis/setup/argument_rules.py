"""Rules about what the ranks came with: values that differ, cannot work, or are taken twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ddp_notebook.diagnosis import majority
from ddp_notebook.diagnosis.setup import torch_errors
from ddp_notebook.diagnosis.training import models as params
from ddp_notebook.model import (
    Case,
    Category,
    Finding,
    RankReport,
    Ranks,
    format_ranks,
    name_ranks,
)

# -- what the ranks came with ------------------------------------------------------------


def invalid_values(case: Case) -> Iterator[Finding]:
    """A value that cannot work anywhere."""
    for finding in torch_errors.of_category(case, Category.ENV_INVALID):
        if _wrong_size(case) is None:
            yield finding


def _wrong_size(case: Case) -> int | None:
    """The WORLD_SIZE with which every rank came, if so many processes cannot have it.

    A group of some of the processes is right: then no more come than it takes.
    """
    sizes = {e.arguments.world_size for e in case.came}
    size = sizes.pop() if len(sizes) == 1 else None
    if size is None or size == case.world_size:
        return None
    fits = len(case.came) <= size and all((e.arguments.rank or 0) < size for e in case.came)
    return size if size > case.world_size or not fits else None


def duplicate_ranks(case: Case) -> Iterator[Finding]:
    """Two processes claim one rank."""
    for came in majority.meetings(case):
        yield from _claimed_twice(came, case)


def _claimed_twice(came: tuple[RankReport, ...], case: Case) -> Iterator[Finding]:
    # A run of some of the session's ranks counts them from 0.
    own = {e.rank: place for place, e in enumerate(case.ranks)}
    claims: dict[int, list[int]] = {}
    for e in came:
        if e.arguments.rank is not None and _same_world(e, case):
            claims.setdefault(e.arguments.rank, []).append(e.rank)
    for claimed, ranks in sorted(claims.items()):
        if len(ranks) < 2:
            continue
        culprits = tuple(rank for rank in ranks if own[rank] != claimed)
        absent = sorted(set(range(case.world_size)) - claims.keys())
        all_came = len(came) == case.world_size
        nobody = f"; nobody is rank {format_ranks(absent)}" if absent and all_came else ""
        yield Finding(
            Category.DUPLICATE_RANK,
            culprits,
            f"{_processes(ranks)} {'both' if len(ranks) == 2 else 'all'} say "
            f"RANK={claimed}{nobody}",
            "Give each process its own RANK: "
            + ", ".join(f"RANK={own[rank]} on rank {rank}" for rank in culprits)
            + ".",
            case.waiting,
            tuple(
                f"the process launched as rank {rank} came with RANK={claimed}" for rank in ranks
            ),
        )


def _same_world(evidence: RankReport, case: Case) -> bool:
    told = case.told.get("WORLD_SIZE", "")
    size = evidence.arguments.world_size
    return size is None or not told or str(size) == told


def _processes(ranks: list[int]) -> str:
    return f"The processes launched as {name_ranks(ranks)}"


def differing_values(case: Case) -> Iterator[Finding]:
    """MASTER_ADDR, MASTER_PORT, WORLD_SIZE, the backend or the method differ between ranks."""
    for came in majority.meetings(case):
        yield from _differing(came, case)


def _differing(came: tuple[RankReport, ...], case: Case) -> Iterator[Finding]:
    for name in majority.VALUES:
        told = case.told.get(name, "")
        values = majority.values_of(name, came, told)
        if len(set(values.values())) < 2:
            continue
        right, culprits = majority.odd_ones(values, told, case.store_host)
        others = tuple(rank for rank in values if rank not in culprits)
        where = f"on {name_ranks(others)}"
        if name.startswith("MASTER") and case.store_host is None and told not in ("", right):
            # The store is where it is, however many ranks agree on another place.
            right, culprits, where = told, tuple(sorted(values)), "where the session's store is"
        yield Finding(
            Category.ENV_MISMATCH,
            culprits,
            f"{name} is {_each(values, culprits)}, but {right} {where}",
            f"Set {majority.assignment(name, right)} on {name_ranks(culprits)}.",
            case.waiting,
            tuple(f"rank {rank}: {name}={value}" for rank, value in sorted(values.items())),
        )


def _each(values: Mapping[int, str], ranks: Ranks) -> str:
    """What these ranks have: one value, or each its own."""
    found = {values[rank] for rank in ranks}
    if len(found) == 1:
        return f"{found.pop()} on {name_ranks(ranks)}"
    return ", ".join(f"{values[rank]} on rank {rank}" for rank in ranks)


def wrong_world_size(case: Case) -> Iterator[Finding]:
    """All ranks expect another number of ranks than there are processes."""
    came, size = case.came, _wrong_size(case)
    if size is None:
        return
    yield Finding(
        Category.WORLD_SIZE_MISMATCH,
        tuple(e.rank for e in came),
        f"The ranks expect {size} ranks, but there are {case.world_size} processes",
        f"Take WORLD_SIZE from the launcher's environment ({case.world_size}), "
        "or start as many processes as ranks.",
        case.waiting,
        tuple(f"rank {e.rank}: world_size={size}" for e in came),
    )


def other_versions(case: Case) -> Iterator[Finding]:
    """torch or Python differ between ranks."""
    for name in ("torch", "python"):
        values = {e.rank: e.versions[name] for e in case.ranks if e.versions.get(name)}
        if name == "python":  # 3.12.1 and 3.12.4 work together
            values = {rank: ".".join(text.split(".")[:2]) for rank, text in values.items()}
        if len(set(values.values())) < 2:
            continue
        right, culprits = majority.odd_ones(values, "", 0)
        yield Finding(
            Category.VERSION_MISMATCH,
            culprits,
            f"{name} is {values[culprits[0]]} on {name_ranks(culprits)}, but {right} elsewhere",
            f"Install {name} {right} for every rank.",
            case.waiting,
            tuple(f"rank {rank}: {name} {value}" for rank, value in sorted(values.items())),
        )


# -- DDP ---------------------------------------------------------------------------------


def differing_models(case: Case) -> Iterator[Finding]:
    """The models that ranks wrap differ in number, order, shape or dtype of their tensors."""
    models = {e.rank: e.model for e in case.ranks if e.model is not None}
    for finding in params.compare(models):
        yield replace(
            finding,
            remedy="Build the same model on every rank: the same arguments, the same order.",
            waiting=case.waiting,
        )
