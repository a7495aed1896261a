"""Which ranks differ from the rest, and which of two values is the right one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from ddp_notebook.model import RankEvidence, Ranks


def odd_ones(values: Mapping[int, str], told: str, host: int | None) -> tuple[str, Ranks]:
    """The right value, and the ranks that have another.

    Right is what the launcher told (if any rank has that), else what more than half of the
    ranks have, else what the store's host has (rank 0 when it is not a rank).
    """
    counts = Counter(values.values())
    common, count = counts.most_common(1)[0]
    if told and told in counts:
        right = told
    elif 2 * count > len(values):
        right = common
    else:
        first = host if host in values else min(values)
        assert first is not None
        right = values[first]
    return right, tuple(rank for rank, value in sorted(values.items()) if value != right)


def _address(evidence: RankEvidence) -> str:
    """MASTER_ADDR by what it means: ``localhost`` and ``127.0.0.1`` are one."""
    name = evidence.arguments.master_addr
    found = evidence.addresses.get(name, ())
    loopback = bool(found) and all(each.startswith("127.") or each == "::1" for each in found)
    return "127.0.0.1" if loopback else name


VALUES: dict[str, Callable[[RankEvidence], str]] = {
    "MASTER_ADDR": _address,
    "MASTER_PORT": lambda e: str(e.arguments.master_port or ""),
    "WORLD_SIZE": lambda e: str(e.arguments.world_size or ""),
    "backend": lambda e: e.arguments.backend,
    "init_method": lambda e: e.arguments.method,
    "the file": lambda e: e.arguments.path,
}
"""What every rank must come with alike."""


def assignment(name: str, value: str) -> str:
    """How a right value is given."""
    return f"{name}={value}" if name.isupper() else f"{name} {value}"


def first_difference(bad: RankEvidence, good: RankEvidence) -> str:
    """Where two models first differ, in words."""
    for place, (mine, theirs) in enumerate(zip(bad.tensors, good.tensors, strict=False)):
        if mine != theirs:
            return (
                f"tensor {place} of the model differs: rank {bad.rank} has {mine[0]} {mine[1]}, "
                f"rank {good.rank} has {theirs[0]} {theirs[1]}"
            )
    return (
        f"rank {bad.rank}'s model has {len(bad.tensors)} tensors, "
        f"rank {good.rank}'s has {len(good.tensors)}"
    )
