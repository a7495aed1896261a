"""What is found in a program of collectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from traces import constructor

from ddp_notebook.diagnosis import diagnose_run
from ddp_notebook.model import Activity, Case, Collective, Finding, Phase, Ranks

Program = list[Collective]

DDP = constructor()


def found(case: Case, sources: Mapping[str, str] | None = None) -> list[tuple[str, Ranks]]:
    """Categories and culprits, without what passes."""
    findings = diagnose_run(case, sources).findings
    for finding in findings:
        assert finding.cause
        assert finding.remedy
        assert "\n" not in finding.cause + finding.remedy
    return [(str(f.category), f.ranks) for f in findings if not f.passing]


def the_one(case: Case, sources: Mapping[str, str] | None = None) -> Finding:
    """The only finding that does not pass."""
    (finding,) = [f for f in diagnose_run(case, sources).findings if not f.passing]
    return finding


def same(size: int, program: Program, **other: Program) -> dict[int, Program]:
    """One program on all ranks but those given as ``r1=...``."""
    of = {rank: list(program) for rank in range(size)}
    return of | {int(name[1:]): own for name, own in other.items()}


def lost(case: Case, *ranks: int, text: str = "Connection closed by peer") -> Case:
    """The case when these ranks, which waited, were given an error by torch."""
    return replace(
        case,
        ranks=tuple(
            replace(e, activity=Activity.FAILED, error_type="RuntimeError", error_text=text)
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
        replace(
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
