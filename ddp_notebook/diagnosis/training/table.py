"""The engine of the tables `equal` and `coverage`: rows that say how a value is read and judged.

A row names the value that is read of each rank, its test, the culprits, and the finding, whose
words are in the catalogue. The function below rows yields the things that several ranks have, by
rank, for which their premise holds. A new mistake is a row. The links above a table are reports of
people who had the mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from itertools import islice
from typing import Any, Generic, TypeVar

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.majority import outvoted
from ddp_notebook.model import Finding, Ranks, by_value

T = TypeVar("T")
Find = Callable[[Context], Iterable[Finding]]


@dataclass(frozen=True)
class Compared(Generic[T]):
    """One thing on several ranks, the value of it that is compared, and whose value is wrong."""

    context: Context
    by_rank: Mapping[int, T]
    values: Mapping[int, Any]
    culprits: Ranks = ()
    """The ranks whose value is wrong; none before that was judged."""

    @property
    def culprit(self) -> T:
        """The thing on the first of the culprits."""
        return self.by_rank[self.culprits[0]]

    @property
    def undecided(self) -> bool:
        """True where no rank's value is right rather than another's."""
        return len(self.culprits) == len(self.by_rank)

    def against(self, texts: Mapping[int, str]) -> dict[str, Any]:
        """Return facts for a title: `who` has its `own` text, and the `rest` of the ranks `right`.

        Where no rank is right rather than another, `who` are the ranks with the first text.
        """
        who = by_value(texts)[0][0] if self.undecided else self.culprits
        rest = tuple(rank for rank in texts if rank not in who)
        return {"who": who, "own": _any(texts, who), "rest": rest, "right": _any(texts, rest)}

    def lines(self, text: Callable[[T], str]) -> tuple[str, ...]:
        """Return what each rank has, as lines of evidence."""
        return tuple(f"rank {rank}: {text(each)}" for rank, each in self.by_rank.items())


def _any(texts: Mapping[int, str], ranks: Ranks) -> str:
    known = dict.fromkeys(texts[rank] for rank in ranks)
    return " or ".join(known) if len(known) <= _MOST_VALUES else "other values"


_MOST_VALUES = 2


def differs(seen: Compared[Any]) -> bool:
    """True where not all ranks have the same value."""
    return len(set(seen.values.values())) > 1


def everyone(seen: Compared[Any]) -> Ranks:
    """Return all ranks: each has the same mistake, or none is more right than another."""
    return tuple(sorted(seen.by_rank))


def those_that_have(seen: Compared[Any]) -> Ranks:
    """Return the ranks whose value is not empty, or not zero."""
    return tuple(rank for rank, value in seen.values.items() if value)


@dataclass(frozen=True)
class Row(Generic[T]):
    """A row of the table: how one value is read and judged, and the finding.

    `whose` names the culprits, if any: by default the ranks whose value is not that of most.
    `is_wrong` is the condition that must hold besides.
    """

    read: Callable[[T], Hashable]
    says: Callable[[Compared[T]], Finding]
    is_wrong: Callable[[Compared[T]], bool] = lambda _: True
    whose: Callable[[Compared[T]], Ranks] = lambda seen: outvoted(seen.values)

    def finding(self, context: Context, by_rank: Mapping[int, T]) -> Finding | None:
        """Return the mistake in this value on these ranks; None for no mistake."""
        values = {rank: self.read(each) for rank, each in by_rank.items()}
        seen = Compared(context, by_rank, values)
        seen = replace(seen, culprits=self.whose(seen) if self.is_wrong(seen) else ())
        return self.says(seen) if seen.culprits else None


def rule(
    *rows: Row[T], most: int = 2
) -> Callable[[Callable[[Context], Iterable[Mapping[int, T]]]], Find]:
    """Make a scope a rule that judges these rows in it: at most so many findings in each.

    One is the most where what a later row finds may follow from what an earlier one has found.
    """

    def judging(scope: Callable[[Context], Iterable[Mapping[int, T]]]) -> Find:
        @wraps(scope)
        def find(context: Context) -> Iterator[Finding]:
            for by_rank in scope(context):
                found = (row.finding(context, by_rank) for row in rows)
                yield from islice((finding for finding in found if finding is not None), most)

        return find

    return judging
