"""Post-run checks: is what a finished run computed right? Asks each rank once, and compares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_notebook.diagnosis import training_findings
from ddp_notebook.model import Collectives, Diagnosis, Ranks, RunFacts, codec
from ddp_notebook.session.runs.run import CellRun

if TYPE_CHECKING:
    from ddp_notebook.cluster.cluster import RankCluster
    from ddp_notebook.session.processes.collective_logs import CollectiveLogs

QUESTION = "facts of the run"
ASK_TIMEOUT_S = 2.0


def examine(run: CellRun, cluster: RankCluster, logs: CollectiveLogs) -> Diagnosis | None:
    """What is wrong with a run that every rank has finished; None for nothing.

    No rank is asked unless ranks have trained in it: other cells are as fast as before.
    """
    ended = run.finished.values()
    if len(run.ranks) < 2 or len(run.finished) < len(run.ranks):
        return None
    if any(end.outcome != "ok" for end in ended) or not any(end.trained for end in ended):
        return None
    facts = gather_facts(cluster, run.ranks, run.cell)
    if set(facts) != set(run.ranks):
        return None  # of some ranks alone little can be compared
    findings = training_findings(facts, Collectives())
    if findings:  # what ranks have averaged by hand is no mistake; records take longer to read
        collectives = logs.read(run.ranks, run.cell)
        findings = training_findings(facts, collectives)
    return Diagnosis(findings, None, len(run.ranks)) if findings else None


def gather_facts(cluster: RankCluster, ranks: Ranks, run: int) -> dict[int, RunFacts]:
    """What the ranks know of `run`; of those that answer, and know of it."""
    answers = cluster.ask(ranks, QUESTION, ASK_TIMEOUT_S)
    known = {
        r: codec.decode(RunFacts, answer) for r, answer in answers.items() if "error" not in answer
    }
    return {rank: facts for rank, facts in known.items() if facts.run == run}
