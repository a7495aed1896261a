"""Post-run checks: did a finished run compute what it should? Asks each rank once, compares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_notebook.diagnosis import diagnose_training
from ddp_notebook.diagnosis.steps.slow import slow_ranks
from ddp_notebook.model import Collectives, Diagnosis, Ranks, Remark, RunFacts
from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import answered
from ddp_notebook.session.runs.run import CellRun

if TYPE_CHECKING:
    from ddp_notebook.cluster.rank_cluster import RankCluster
    from ddp_notebook.session.processes.collective_logs import CollectiveLogs

ASK_TIMEOUT_S = 2.0


def examine(run: CellRun, cluster: RankCluster, logs: CollectiveLogs) -> Diagnosis | None:
    """The diagnosis of a run that every rank has finished; None if no problem is found.

    Asks only after training, or if a collective was not waited for: other cells stay fast.
    """
    ended = run.finished.values()
    if len(run.ranks) < 2 or len(run.finished) < len(run.ranks):
        return None
    if any(end.outcome != "ok" for end in ended) or not any(end.trained for end in ended):
        return None
    facts = gather_facts(cluster, run.ranks, run.cell)
    if set(facts) != set(run.ranks):
        return None  # of some ranks alone little can be compared
    diagnosis = diagnose_training(facts, Collectives(), run.sources)
    # What ranks averaged by hand is no mistake. Not always: records are read slowly.
    if diagnosis.findings:
        collectives = logs.read(run.ranks, run.cell)
        diagnosis = diagnose_training(facts, collectives, run.sources)
    return diagnosis if diagnosis.findings or diagnosis.notes else None


def gather_facts(cluster: RankCluster, ranks: Ranks, run: int) -> dict[int, RunFacts]:
    """The ranks' training reports of `run`, from those that answer and took part."""
    answers = cluster.ask(ranks, calls.RUN_FACTS, calls.Nothing(), ASK_TIMEOUT_S)
    return {rank: facts for rank, facts in answered(answers).items() if facts.run == run}


def remarks(run: CellRun, cluster: RankCluster) -> tuple[Remark, ...]:
    """Remarks on a run without a problem: whether a rank is slow."""
    answers = cluster.ask(run.ranks, calls.STEP_TIMES, calls.Nothing(), ASK_TIMEOUT_S)
    times = {rank: times for rank, times in answered(answers).items() if times.run == run.cell}
    # A pause at a line is the user's time, and stands in the rank's own.
    known = set(times) == set(run.ranks) and not run.pauses
    return slow_ranks(times) if known else ()
