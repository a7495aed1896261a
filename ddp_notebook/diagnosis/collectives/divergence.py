"""A fault with its two sides: the ranks that part, and those they part from."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ddp_notebook.diagnosis.collectives.alignment import Block, Deviation, Track, site
from ddp_notebook.diagnosis.context import Picture, fact, named, nothing_after
from ddp_notebook.model import Category, Collective, Finding, Ranks, name_ranks


@dataclass(frozen=True)
class Side:
    """The ranks on one side of a fault, and their track; `at` is their slot there."""

    ranks: Ranks
    track: Track
    at: int

    @property
    def named(self) -> str:
        """``rank 1``, ``ranks 0,2``."""
        return name_ranks(self.ranks)

    def verb(self, one: str, many: str) -> str:
        """The one of two verbs that goes with as many ranks."""
        return one if len(self.ranks) == 1 else many

    @property
    def here(self) -> Collective | None:
        """What they have at the fault; None where they had ended."""
        return self.track.at(self.at)

    def knows(self, record: Collective) -> bool:
        """True when they have called the same at the same lines, before or after."""
        return site(record) in self.track.sites

    def knew(self, record: Collective) -> bool:
        """True when they had called it before the fault."""
        return self.track.sites.get(site(record), self.at) < self.at

    def repeats(self, record: Collective, since: Collective) -> bool:
        """True when they went round and round with `record`, and without `since`, up to here."""
        mine, other, times = site(record), site(since), 0
        for index in range(min(self.at, self.track.end) - self.track.first - 1, -1, -1):
            found = site(self.track.records[index])
            if found == other:
                return False
            times += found == mine
            if times > 1:
                return True
        return False


@dataclass(frozen=True)
class Parting:
    """A deviation at its first fault, in its picture."""

    picture: Picture
    deviation: Deviation
    fault: Block

    @property
    def mine(self) -> Side:
        """The ranks that part."""
        return Side(self.deviation.ranks, self.deviation.track, self.fault.own_at)

    @property
    def theirs(self) -> Side:
        """Those they part from."""
        return Side(self.deviation.others, self.deviation.reference, self.fault.other_at)

    @property
    def everyone(self) -> Ranks:
        """The ranks of both sides."""
        return tuple(sorted({*self.mine.ranks, *self.theirs.ranks}))

    def culprits(self, else_side: Side | None) -> Ranks:
        """Those who are outvoted; without a majority these, or everyone."""
        if self.deviation.sure:
            return self.deviation.ranks
        return else_side.ranks if else_side else self.everyone

    def against_habit(self) -> Side | None:
        """The side that does not do what always came next until then, if one does."""
        track = self.mine.track
        keys = track.keys[: self.fault.own_at - track.first]
        if not keys:
            return None
        after: list[int | None] = [b for a, b in pairwise(keys) if a == keys[-1]]
        own, other = (after.count(_key(side)) for side in (self.mine, self.theirs))
        if own == other:
            return None
        return self.mine if own < other else self.theirs

    def finding(
        self,
        category: Category,
        culprits: Ranks,
        cause: str,
        remedy: str,
        facts: tuple[str, ...] = (),
    ) -> Finding:
        """A finding with what both sides have at the fault for evidence."""
        evidence = []
        for side in (self.mine, self.theirs):
            here = side.here
            if here is not None:
                evidence.append(fact(side.ranks, here))
            else:
                evidence.append(nothing_after(side.named, side.track.end - 1))
        return Finding(category, culprits, cause, remedy, self.picture.victims, (*evidence, *facts))

    def side_by_side(self) -> str:
        """``rank 0 is in barrier at train.py:31; ranks 1-2 in all_reduce at train.py:44``."""
        said: list[str] = []
        for side in (self.mine, self.theirs):
            here = side.here
            where = f"in {named(here)}" if here else f"{side.verb('has', 'have')} ended"
            verb = f"{side.verb('is', 'are')} " if here and not said else ""
            said.append(f"{side.named} {verb}{where}")
        return "; ".join(said)


def _key(side: Side) -> int | None:
    index = side.at - side.track.first
    return side.track.keys[index] if index < len(side.track.keys) else None
