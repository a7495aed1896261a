"""What is found in a program of collectives, in its training, or in its log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from traces import constructor, with_facts

from ddp_notebook.diagnosis import diagnose_run, diagnose_training
from ddp_notebook.jobs.target import Left
from ddp_notebook.model import (
    Activity,
    Case,
    Collective,
    Collectives,
    Diagnosis,
    Finding,
    Phase,
    Ranks,
    RunFacts,
)

Program = list[Collective]
LONGEST_TITLE = 105
"""Characters of a title; what is made up here has longer numbers than a job has."""

DDP = constructor()


def found(case: Case, sources: Mapping[str, str] | None = None) -> list[tuple[str, Ranks]]:
    """Categories and culprits, without what passes."""
    diagnosis = diagnose_run(case, sources)
    failed = [note for note in diagnosis.notes if note.startswith("The rule ")]
    assert not failed, failed
    findings = diagnosis.findings
    for finding in findings:
        assert finding.cause
        assert finding.remedy
        assert "\n" not in finding.cause + finding.remedy
        assert not finding.titled or len(finding.cause) <= LONGEST_TITLE, finding.cause
    return [(str(f.category), f.ranks) for f in findings if not f.passing]


def the_one(case: Case, sources: Mapping[str, str] | None = None) -> Finding:
    """The only finding that does not pass."""
    (finding,) = [f for f in diagnose_run(case, sources).findings if not f.passing]
    return finding


def lines_of(finding: Finding) -> list[int]:
    """The lines of both branches; 0 for one that calls nothing."""
    return [side.place.line if side.place else 0 for side in finding.sides]


def found_in_training(
    facts: Iterable[RunFacts], collectives: Collectives, source: str = ""
) -> tuple[Finding, ...]:
    """What is found in training that ended well; `source` is the code of train.py."""
    of = {each.rank: each for each in facts}
    diagnosis = diagnose_training(of, collectives, {"train.py": source})
    assert not diagnosis.notes, diagnosis.notes
    for finding in diagnosis.findings:
        assert finding.remedy and finding.evidence and "\n" not in finding.cause
    return diagnosis.findings


def diagnosed_log(folder: Path, text: str) -> Diagnosis:
    """What is found in the log of an ended job."""
    (folder / "job.log").write_text(text)
    return Left([folder / "job.log"]).why().diagnosis


def same(size: int, program: Program, **other: Program) -> dict[int, Program]:
    """One program on all ranks but those given as ``r1=...``."""
    of = {rank: list(program) for rank in range(size)}
    return of | {int(name[1:]): own for name, own in other.items()}


def lost(case: Case, *ranks: int, text: str = "Connection closed by peer") -> Case:
    """The case when these ranks, which waited, were given an error by torch."""
    return replace(
        case,
        ranks=tuple(
            with_facts(e, activity=Activity.FAILED, error_type="RuntimeError", error_text=text)
            if e.rank in ranks
            else e
            for e in case.ranks
        ),
    )


SKIP = """
for x in loader:
    try:
        loss = net(x)
    except ValueError:
        continue
    loss.backward()
"""


def refuse(case: Case, rank: int, text: str) -> Case:
    of = dict(case.collectives.of)
    of[rank] = (*of[rank][:-1], replace(of[rank][-1], phase=Phase.REFUSED))
    ranks = tuple(
        with_facts(
            e, activity=Activity.FAILED, error_type="RuntimeError", error_text=text, waits_for=None
        )
        if e.rank == rank
        else e
        for e in case.ranks
    )
    return replace(case, ranks=ranks, collectives=replace(case.collectives, of=of))


def refused(record: Collective) -> Collective:
    """A collective that its rank was refused."""
    return replace(record, phase=Phase.REFUSED)
