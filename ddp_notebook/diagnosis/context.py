"""All that rules about collectives look at: the case, and what is worked out from it once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ddp_notebook.diagnosis.collectives.alignment import Alignment, Block, Deviation, align_all
from ddp_notebook.diagnosis.collectives.compare import Difference, first_conflict, first_fault
from ddp_notebook.diagnosis.collectives.source_code import Sources
from ddp_notebook.diagnosis.collectives.wait_graph import WaitGraph, gave_up, wait_graph
from ddp_notebook.model import (
    Activity,
    Case,
    Collective,
    RankReport,
    Ranks,
    name_ranks,
)


@dataclass(frozen=True)
class Judged:
    """A deviation, the slot that proves it to be a mistake if one does, and its first fault."""

    alignment: Alignment
    deviation: Deviation
    conflict: tuple[int, Difference] | None
    fault: Block | None


@dataclass(frozen=True)
class Picture:
    """A case with its alignments and its wait-for graph; `sources` is the user's code."""

    case: Case
    sources: Sources = field(default_factory=Sources)

    @cached_property
    def alignments(self) -> Mapping[str, Alignment]:
        """By group."""
        return align_all(self.case.collectives)

    @cached_property
    def judged(self) -> tuple[Judged, ...]:
        """Every deviation of every group."""
        return tuple(
            Judged(alignment, each, first_conflict(each), first_fault(each))
            for _, alignment in sorted(self.alignments.items())
            for each in alignment.deviations
        )

    @cached_property
    def graph(self) -> WaitGraph:
        """Who waits for whom."""
        return wait_graph(self.case)

    @cached_property
    def evidence(self) -> Mapping[int, RankReport]:
        """By rank."""
        return {e.rank: e for e in self.case.ranks}

    @cached_property
    def run(self) -> int:
        """The session's number of the run that is looked at."""
        return max((e.run for e in self.case.ranks), default=0)

    @cached_property
    def victims(self) -> Ranks:
        """The ranks that wait, and those that gave up waiting."""
        return tuple(
            e.rank for e in self.case.ranks if e.activity is Activity.WAITING or gave_up(e)
        )

    @cached_property
    def interrupted(self) -> bool:
        """True when the user stopped the run: ranks end anywhere then, and prove nothing."""
        return any(
            e.activity is Activity.FAILED and e.error_type == "KeyboardInterrupt"
            for e in self.case.ranks
        )

    def finished(self, rank: int) -> bool:
        """True of a rank that ran what the others run, and is through with it."""
        e = self.evidence.get(rank)
        if e is None:
            return False
        ended = e.activity is Activity.DEAD and e.exit_code == 0
        return ended or (e.activity is Activity.IDLE and e.run == self.run)

    def gone(self, rank: int) -> bool:
        """True of a rank that issues nothing any more, for whatever reason."""
        e = self.evidence.get(rank)
        return e is not None and e.activity in (Activity.IDLE, Activity.FAILED, Activity.DEAD)

    def destroyed(self, rank: int) -> bool:
        """True of a rank that had a group and has none any more, or whose process ended."""
        e = self.evidence.get(rank)
        if e is None:
            return False
        had_one = bool(e.left) or bool(self.case.collectives.of.get(rank))
        return e.activity is Activity.DEAD or (had_one and not e.initialized)

    def standing(self, ranks: Ranks, aside: Ranks = ()) -> str:
        """Where ranks stand, those in one place together: ``rank 0 is in barrier at a.py:3``."""
        places: dict[str, list[int]] = {}
        for rank in ranks:
            if rank not in aside:
                places.setdefault(self._stands(rank), []).append(rank)
        return "; ".join(
            f"{name_ranks(those)} {'is' if len(those) == 1 else 'are'} {where}"
            if where.startswith("in ")
            else f"{name_ranks(those)} {where if len(those) == 1 else plural(where)}"
            for where, those in places.items()
        )

    def _stands(self, rank: int) -> str:
        record = self.graph.at.get(rank)
        e = self.evidence[rank]
        if record is not None:
            return f"in {named(record)}"
        match e.activity:
            case Activity.WAITING:
                return f"waits in {e.inside}"
            case Activity.BUSY if e.workers:
                return f"waits for a batch{f' at {e.path[-1]}' if e.path else ''}"
            case Activity.BUSY:
                return f"is busy{f' at {e.path[-1]}' if e.path else ''}"
            case Activity.IDLE if e.run == self.run:
                return "has finished"
            case Activity.IDLE:
                return "runs nothing"
            case Activity.DEAD:
                return "has ended"
            case Activity.FAILED:
                return "has failed"
            case _:
                return "is held" if e.activity is Activity.HELD else "does not answer"


def plural(said: str) -> str:
    """``has finished`` of one rank, ``have finished`` of several."""
    for one, many in (("has ", "have "), ("is ", "are "), ("waits ", "wait "), ("runs ", "run ")):
        if said.startswith(one):
            return many + said.removeprefix(one)
    return said.replace("does not", "do not")


def called(record: Collective) -> str:
    """What a learner knows it by: the function called, and torch's operation if it differs."""
    name = record.operation
    if record.api and record.api.rpartition(".")[2] != record.operation:
        api = record.api.removesuffix(".__init__")
        name = f"{api} ({record.operation})"
    return f"{name} of {record.label!r}" if record.label else name


def named(record: Collective) -> str:
    """A record with its line: ``barrier at train.py:31 in save``."""
    to = ""
    if record.is_point_to_point:
        to = f" {'to' if record.operation == 'send' else 'from'} "
        to += f"rank {record.peer}" if record.peer is not None else "any rank"
    return f"{called(record)}{to}" + (f" at {record.place}" if record.place else "")


def in_slot(record: Collective) -> str:
    """For evidence: the slot, what is in it, where it was called."""
    what = f" {record.dtype} {list(record.shape)}" if record.dtype else ""
    group = "" if record.group == "default" else f" of group {record.group}"
    return f"slot {record.slot}{group}: {called(record)}{what}" + (
        f" at {record.place}" if record.place else ""
    )


def fact(ranks: Ranks, record: Collective) -> str:
    """A line of evidence: what these ranks have in a slot."""
    return f"{name_ranks(ranks)}, {in_slot(record)}"


def nothing_after(who: str, slot: int) -> str:
    """A line of evidence: what `who` lack."""
    return f"{who}: nothing after slot {slot}" if slot >= 0 else f"{who}: nothing"
