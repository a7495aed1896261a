"""What was seen of one job on several hosts, as one: each rank as its own host knows it.

The clocks of hosts begin at different times. Each host tells the time of day with its clock, so
times can be compared as far as the hosts agree on the time of day.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from ddp_notebook.archive.format import Observed, SavedRun
from ddp_notebook.jobs import prepared
from ddp_notebook.jobs.verdict import Verdict, for_others
from ddp_notebook.model import (
    Activity,
    Case,
    Collective,
    Collectives,
    Diagnosis,
    RankReport,
    name_ranks,
    verb,
)
from ddp_notebook.views.ansi import plain

NOT_SEEN = "no process of it was found on the hosts that were asked"
Runs = Mapping[str, SavedRun]
"""What was seen, by host."""


def joined(runs: Runs) -> Case:
    """The case of all ranks, with the times of this host's clock."""
    cases = {host: _here(run) for host, run in runs.items()}
    size = max(case.world_size for case in cases.values())
    reports = {rank: RankReport(rank, doing=NOT_SEEN) for rank in range(size)}
    groups: dict[str, tuple[int, ...]] = {}
    of: dict[int, tuple[Collective, ...]] = {}
    first: dict[int, int] = {}
    sources: dict[str, str] = {}
    for host, case in cases.items():
        there = observed(runs[host]).ranks
        known = case.collectives
        reports |= {e.rank: replace(e, host=e.host or host) for e in case.ranks if e.rank in there}
        of |= {rank: records for rank, records in known.of.items() if rank in there}
        first |= {rank: number for rank, number in known.first.items() if rank in there}
        groups = {**known.groups, **groups}
        sources = {**case.sources, **sources}
    return replace(
        next(iter(cases.values())),
        ranks=tuple(reports[rank] for rank in range(size)),
        collectives=Collectives(of, groups, first),
        sources=sources,
    )


def diagnosed(runs: Runs) -> Diagnosis:
    """What is wrong with the job, as far as one look at it tells; on one host, what it found."""
    if len(runs) == 1:
        (run,) = runs.values()
        return run.diagnosis or prepared.by_rules(joined(runs))
    if not all(observed(run).prepared for run in runs.values()):
        return _one_by_one(runs)
    case = joined(runs)
    seen = {rank for run in runs.values() for rank in observed(run).ranks}
    diagnosis = prepared.by_rules(case, all_seen=seen.issuperset(range(case.world_size)))
    return (
        diagnosis if diagnosis.wrong else replace(diagnosis, unsure=_unsure(case, diagnosis.unsure))
    )


def judged(diagnosis: Diagnosis, runs: Runs) -> Verdict:
    """A diagnosis with what it stands on."""
    basis = "; ".join(f"{plain(observed(run).basis)}, on {host}" for host, run in runs.items())
    unread = ((host, note) for host, run in runs.items() for note in observed(run).unread)
    notes = (f"{host}: {plain(note)}" for host, note in unread)
    return (
        for_others(diagnosis, basis, notes)
        if len(runs) > 1
        else Verdict(diagnosis, basis, tuple(notes))
    )


def observed(run: SavedRun) -> Observed:
    """How a host looked at the job."""
    return run.observed or Observed("a job")


def _one_by_one(runs: Runs) -> Diagnosis:
    """What was found on each host: stacks alone do not tell which collectives of hosts meet."""
    diagnosis = prepared.by_rules(Case(joined(runs).ranks))
    findings = [
        finding for run in runs.values() if run.diagnosis for finding in run.diagnosis.findings
    ]
    return replace(diagnosis, findings=tuple(findings), unsure="" if findings else _ONE_BY_ONE)


_ONE_BY_ONE = (
    "Undecided: the job was not prepared, and from outside what ranks of one host wait for on "
    "another is not seen."
)


def _unsure(case: Case, why: str) -> str:
    """Why the absence of findings proves nothing."""
    silent = case.where(Activity.SILENT)
    if silent:
        return f"No problem found so far: {verb(silent, 'was', 'were')} not seen."
    running = case.where(Activity.BUSY, Activity.WAITING, Activity.HELD)
    return why or (f"No problem found so far: {name_ranks(running)} still run." if running else "")


def _here(run: SavedRun) -> Case:
    """Its case, with times as this host's clock has them."""
    case = run.case or Case(())
    late_ns = run.wall_ns - run.snapshot.taken_ns - (time.time_ns() - time.monotonic_ns())
    of = {
        rank: tuple(_shifted(record, late_ns) for record in records)
        for rank, records in case.collectives.of.items()
    }
    ranks = tuple(replace(e, called_ns=_at(e.called_ns, late_ns)) for e in case.ranks)
    return replace(case, ranks=ranks, collectives=replace(case.collectives, of=of))


def _shifted(record: Collective, late_ns: int) -> Collective:
    return replace(
        record, issued_ns=_at(record.issued_ns, late_ns), done_ns=_at(record.done_ns, late_ns)
    )


def _at(there_ns: int, late_ns: int) -> int:
    """A time of this host's clock; 0, for none, stays."""
    return there_ns + late_ns if there_ns else 0
