"""Post-run checks: did a finished run compute what it should? Asks each rank once, compares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_notebook.diagnosis import diagnose_training
from ddp_notebook.diagnosis.training.slow import slow_ranks
from ddp_notebook.model import Collectives, Diagnosis, Remark, RunFacts
from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import answered

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddp_notebook.cluster.rank_cluster import RankCluster
    from ddp_notebook.session.collective_logs import CollectiveLogs
    from ddp_notebook.session.runs.run_events import RunEvents

_ASK_TIMEOUT_S = 2.0


def examine(
    events: RunEvents, cluster: RankCluster, logs: CollectiveLogs, sources: Mapping[str, str]
) -> Diagnosis | None:
    """Diagnose a run that every rank has finished; None if no problem is found.

    Asks only after training, or if a collective was not waited for: other cells stay fast.
    """
    ends = {(end.outcome, end.trained) for end in events.finished.values()}
    if len(events.ranks) < 2 or len(events.finished) < len(events.ranks):
        return None
    if not {("ok", True)} <= ends <= {("ok", True), ("ok", False)}:
        return None
    facts = _facts(events, cluster)
    if set(facts) != set(events.ranks):
        return None  # of some ranks alone little can be compared
    diagnosis = diagnose_training(facts, Collectives(), sources)
    # What ranks averaged by hand is no mistake. Not always: records are read slowly.
    if diagnosis.findings:
        collectives = logs.read(events.ranks, events.cell)
        diagnosis = diagnose_training(facts, collectives, sources)
    return diagnosis if diagnosis.findings or diagnosis.notes else None


def _facts(events: RunEvents, cluster: RankCluster) -> dict[int, RunFacts]:
    """Ask the ranks for their training reports of the run; only those that took part have one."""
    answers = cluster.ask(events.ranks, calls.RUN_FACTS, calls.Nothing(), _ASK_TIMEOUT_S)
    return {rank: facts for rank, facts in answered(answers).items() if facts.run == events.cell}


def remarks(events: RunEvents, cluster: RankCluster) -> tuple[Remark, ...]:
    """Return remarks on a run without a problem: whether a rank is slow."""
    answers = cluster.ask(events.ranks, calls.STEP_TIMES, calls.Nothing(), _ASK_TIMEOUT_S)
    times = {rank: times for rank, times in answered(answers).items() if times.run == events.cell}
    # A pause at a line is the user's time, and stands in the rank's own.
    known = set(times) == set(events.ranks) and not events.pauses
    return slow_ranks(times) if known else ()
