"""The input of the rules: all ranks' reports, and what is derived from them once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby

from ddp_notebook.diagnosis.collectives import describe
from ddp_notebook.diagnosis.collectives.alignment import Alignment, align_all
from ddp_notebook.diagnosis.collectives.divergence import Divergence, divergences
from ddp_notebook.diagnosis.collectives.wait_graph import WaitGraph, gave_up, wait_graph
from ddp_notebook.diagnosis.progress import call_number
from ddp_notebook.diagnosis.source_code.sources import Sources
from ddp_notebook.diagnosis.training.replicas import Model, models
from ddp_notebook.model import (
    Activity,
    Case,
    Collectives,
    RankReport,
    Ranks,
    ReplicaCounts,
    RunFacts,
    by_value,
    name_ranks,
)


@dataclass(frozen=True)
class Context:
    """A case, the user's code, and what each rank knows of the training in a run that ended well.

    Whatever is derived from them is computed when a rule first asks for it.
    """

    case: Case
    sources: Sources = field(default_factory=Sources)
    facts: Mapping[int, RunFacts] = field(default_factory=dict)

    @property
    def collectives(self) -> Collectives:
        """The collectives of every rank."""
        return self.case.collectives

    @cached_property
    def reports(self) -> Mapping[int, RankReport]:
        """The ranks' reports, by rank."""
        return {report.rank: report for report in self.case.ranks}

    # -- setup --------------------------------------------------------------------------

    @cached_property
    def meetings(self) -> tuple[tuple[RankReport, ...], ...]:
        """The ranks that called init_process_group, by the number of their call.

        Only ranks in the same call can meet; of ranks that gave stores of their own to it, those
        with the same one.
        """
        meetings: list[tuple[RankReport, ...]] = []
        for _, callers in groupby(sorted(self.case.callers, key=call_number), call_number):
            call = tuple(callers)
            stores = by_value({report.rank: report.arguments.store for report in call})
            parts = [tuple(r for r in call if r.rank in ranks) for ranks, _ in stores]
            # By store only where as many share each as its group is to have.
            whole = all(
                report.arguments.store and report.arguments.world_size == len(part)
                for part in parts
                for report in part
            )
            meetings += parts if whole else [call]
        return tuple(meetings)

    # -- training ------------------------------------------------------------------------

    @cached_property
    def replicas(self) -> tuple[ReplicaCounts, ...]:
        """What is known of all ranks' DDP objects, during a run or after it."""
        reported = (report.parts.replicas for report in self.case.ranks)
        return (*chain(*reported), *chain(*(each.replicas for each in self.facts.values())))

    # -- collectives ---------------------------------------------------------------------

    @cached_property
    def alignments(self) -> Mapping[str, Alignment]:
        """The alignments, by group."""
        return align_all(self.collectives)

    @cached_property
    def divergences(self) -> tuple[Divergence, ...]:
        """The divergences of every group."""
        return tuple(
            divergence
            for _, alignment in sorted(self.alignments.items())
            for divergence in divergences(alignment)
        )

    @cached_property
    def graph(self) -> WaitGraph:
        """The ranks that wait, each with those that it waits for."""
        return wait_graph(self.case)

    @cached_property
    def run(self) -> int:
        """The session's number of the run that is judged."""
        return max((report.run for report in self.case.ranks), default=0)

    @cached_property
    def victims(self) -> Ranks:
        """The ranks that wait, and those that gave up waiting."""
        return tuple(
            report.rank
            for report in self.case.ranks
            if report.activity is Activity.WAITING or gave_up(report)
        )

    @cached_property
    def interrupted(self) -> bool:
        """True when the user stopped the run: ranks end anywhere then, which proves nothing."""
        return any(
            report.activity is Activity.FAILED and report.error.type == "KeyboardInterrupt"
            for report in self.case.ranks
        )

    def finished(self, rank: int) -> bool:
        """True of a rank that ran what the others run, to its end."""
        report = self.reports.get(rank)
        if report is None:
            return False
        ended = report.activity is Activity.DEAD and report.end.code == 0
        return ended or (report.activity is Activity.IDLE and report.run == self.run)

    def gone(self, rank: int) -> bool:
        """True of a rank that issues nothing any more, for whatever reason."""
        report = self.reports.get(rank)
        ended = (Activity.IDLE, Activity.FAILED, Activity.DEAD)
        return report is not None and report.activity in ended

    def destroyed(self, rank: int) -> bool:
        """True of a rank whose group was destroyed, or whose process ended."""
        report = self.reports.get(rank)
        if report is None:
            return False
        had_one = bool(report.left) or bool(self.collectives.of.get(rank))
        return report.activity is Activity.DEAD or (had_one and not report.initialized)

    def standing(self, ranks: Ranks) -> str:
        """Where ranks are: ``rank 0 is waiting in ... at a.py, line 3; rank 1 has finished``."""
        places = describe.standing(ranks, self.graph.at, self.reports, self.run)
        return "; ".join(f"{name_ranks(those)} {doing}" for those, doing in places)

    def briefly(self, ranks: Ranks, most: int = 60) -> str:
        """Where ranks are, without lines, in a title: two places, or the first if it gets long."""
        of = describe.standing(ranks, self.graph.at, self.reports, self.run, describe.short_name)
        shown = [f"{name_ranks(those)} {doing}" for those, doing in of]
        if len(of) > 2 or len("; ".join(shown)) > most:
            rest = len(ranks) - len(of[0][0])
            shown = [shown[0], *([f"{rest} more elsewhere"] if rest else [])]
        return "; ".join(shown)

    # -- training ------------------------------------------------------------------------

    @cached_property
    def models(self) -> tuple[Model, ...]:
        """The models that ranks trained, each with its replicas."""
        return models(self.facts)
