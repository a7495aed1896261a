"""The engine of the tables `equal` and `coverage`: rows that say how a value is read and judged.

A row names what is read of each rank, what makes it a mistake, whose mistake it is, what to say and
what to do. A scope gives the things that several ranks have, by rank, for which the row's premise
holds. A new mistake is a row; what it says of a run is computed here alone. The links above a table
are reports of people who had the mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Generic, TypeVar

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.majority import outvoted
from ddp_notebook.model import Category, Finding, Ranks

T = TypeVar("T")
Find = Callable[[Context], Iterable[Finding]]


@dataclass(frozen=True)
class Compared(Generic[T]):
    """One thing on several ranks, the value of it that is compared, and whose value is wrong."""

    context: Context
    of: Mapping[int, T]
    values: Mapping[int, Any]
    ranks: Ranks = ()

    @property
    def each(self) -> T:
        """That of the first rank whose value is wrong."""
        return self.of[self.ranks[0]]

    @property
    def undecided(self) -> bool:
        """True where no rank's value is right rather than another's."""
        return len(self.ranks) == len(self.of)

    def lines(self, text: Callable[[T], str]) -> tuple[str, ...]:
        """Return what each rank has, as lines of evidence."""
        return tuple(f"rank {rank}: {text(each)}" for rank, each in self.of.items())


def differs(of: Compared[Any]) -> bool:
    """True where not all ranks have the same value."""
    return len(set(of.values.values())) > 1


def everyone(of: Compared[Any]) -> Ranks:
    """Return all ranks: each has the same mistake, or none is more right than another."""
    return tuple(sorted(of.of))


def any_has(of: Compared[Any]) -> bool:
    """True where the value of some rank is not empty, or not zero."""
    return any(of.values.values())


def those_that_have(of: Compared[Any]) -> Ranks:
    """Return the ranks whose value is not empty, or not zero."""
    return tuple(rank for rank, value in of.values.items() if value)


@dataclass(frozen=True)
class Row(Generic[T]):
    """A row of the table: how one value is read, judged and explained.

    `wrong` is by default that not all ranks have the same, and `culprits` are then those whose
    value is not that of most.
    """

    value: Callable[[T], Hashable]
    category: Category
    cause: Callable[[Compared[T]], str]
    remedy: str | Callable[[Compared[T]], str]
    evidence: Callable[[Compared[T]], Iterable[str]]
    wrong: Callable[[Compared[T]], bool] = field(default=differs)
    culprits: Callable[[Compared[T]], Ranks] = field(default=lambda of: outvoted(of.values))

    def finding(self, context: Context, of: Mapping[int, T]) -> Finding | None:
        """Return the mistake in this value on these ranks; None where there is none."""
        compared = Compared(context, of, {rank: self.value(each) for rank, each in of.items()})
        if not self.wrong(compared):
            return None
        compared = replace(compared, ranks=self.culprits(compared))
        return Finding(
            self.category,
            compared.ranks,
            self.cause(compared),
            self.remedy if isinstance(self.remedy, str) else self.remedy(compared),
            evidence=tuple(self.evidence(compared)),
        )


def rule(
    name: str, scope: Callable[[Context], Iterable[Mapping[int, T]]], *rows: Row[T], most: int = 2
) -> Find:
    """Return a rule that judges these rows in each scope: at most so many findings in each.

    One is the most where what a later row finds may follow from what an earlier one has found.
    """

    def find(context: Context) -> Iterator[Finding]:
        for of in scope(context):
            found = (row.finding(context, of) for row in rows)
            yield from islice((finding for finding in found if finding is not None), most)

    find.__name__ = name
    return find
