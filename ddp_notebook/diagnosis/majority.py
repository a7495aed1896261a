"""Which of several values is the right one, and which ranks have another."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from ddp_notebook.model import Ranks, by_value, name_ranks

T = TypeVar("T", bound=Hashable)
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class Vote(Generic[T]):
    """The value that counts as right, the ranks that have it, and the others by their values."""

    value: T
    majority: Ranks
    others: tuple[Ranks, ...]

    @property
    def minority(self) -> Ranks:
        """Every rank with another value."""
        return tuple(sorted(rank for ranks in self.others for rank in ranks))


def vote(values: Mapping[int, T], expected: T | None = None, first: int | None = None) -> Vote[T]:
    """Which of the ranks' values counts as right; there must be one at least.

    It is `expected` if a rank has that, else the value of the most ranks. Of several values
    that equally many have, it is that of rank `first`, by default the lowest.
    """
    sets = by_value(values)
    most = max(len(ranks) for ranks, _ in sets)
    largest = [value for _, value in sets if value == expected]
    largest = largest or [value for ranks, value in sets if len(ranks) == most]
    # A tie has to be broken, as a finding names one side: by the rank on which the others depend,
    # where the caller knows one, else by the lowest.
    decisive = first if first is not None and first in values else min(values)
    right = largest[0] if len(largest) == 1 else values[decisive]
    majority = next(ranks for ranks, value in sets if value == right)
    return Vote(right, majority, tuple(ranks for ranks, value in sets if value != right))


def minority(values: Mapping[int, Hashable]) -> Ranks:
    """The ranks whose value is not that of most, as `vote` decides.

    All ranks when no two of more than two have the same: then all carry the mistake.
    """
    if len(values) > 2 and len(set(values.values())) == len(values):
        return tuple(sorted(values))
    return vote(values).minority


def outvoted(values: Mapping[int, Hashable]) -> Ranks:
    """Return the ranks whose value is not that of most; all of them where no value has the most.

    For values that are not right by themselves: of two ranks that differ either may have changed.
    """
    sets = sorted((ranks for ranks, _ in by_value(values)), key=len)
    if len(sets) > 1 and len(sets[-1]) == len(sets[-2]):
        return tuple(sorted(values))
    return minority(values)


def each_with(texts: Mapping[int, str]) -> str:
    """Which ranks have which of several texts: ``0.1 on rank 0 and 0.2 on rank 1``."""
    *first, last = (f"{text} on {name_ranks(ranks)}" for ranks, text in by_value(texts))
    return " and ".join(filter(None, (", ".join(first), last)))


def by_ranks(of: Mapping[int, U], text: Callable[[U], str] = str) -> tuple[str, ...]:
    """Lines of evidence, one for the ranks with the same text: ``ranks 0-2: 4 steps``."""
    texts = {rank: text(each) for rank, each in of.items()}
    return tuple(f"{name_ranks(ranks)}: {line}" for ranks, line in by_value(texts))
