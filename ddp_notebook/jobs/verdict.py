"""The diagnosis of a job that no notebook started, with its basis, as text and as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from ddp_notebook.diagnosis import failures
from ddp_notebook.diagnosis.setup import torch_errors
from ddp_notebook.model import (
    Case,
    Category,
    Collective,
    Diagnosis,
    Finding,
    Place,
    RankError,
    StackTree,
    codec,
)

FORMAT = "ddp_notebook verdict"
VERSION = 1
"""The version of the JSON; additions keep it, changes and removals do not."""

AT_REST = "asleep, or waiting for something other than a rank"
"""The possible states of a rank that uses no CPU time."""
_AGAIN = "Correct the cause, and start the job again."


class Outcome(Enum):
    """The outcome of a verdict; the value is the exit code of a command."""

    NO_PROBLEM = 0
    FINDING = 1
    UNDECIDED = 2


@dataclass(frozen=True)
class Verdict:
    """`basis` says in words what the diagnosis stands on, `unread` what was left out, and why."""

    diagnosis: Diagnosis
    basis: str
    unread: tuple[str, ...] = ()

    @property
    def outcome(self) -> Outcome:
        """Finding, no problem, or undecided, which it also is where nothing is proven."""
        kinds = [f.category for f in self.diagnosis.findings if not f.passing]
        if any(kind is not Category.UNDECIDED for kind in kinds):
            return Outcome.FINDING
        if kinds or not self.diagnosis.proven:
            return Outcome.UNDECIDED
        return Outcome.NO_PROBLEM

    def to_json(self, job: str) -> dict[str, Any]:
        """As a JSON object, of the form in ``schema.json``; `job` is the name of what it is of."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "job": job,
            "verdict": self.outcome.name.lower().replace("_", "-"),
            "basis": self.basis,
            "unread": list(self.unread),
            **self.diagnosis.to_json(),
        }


def own_errors(case: Case) -> tuple[Finding, ...]:
    """Return the errors of ranks, without those that only waited: theirs are no cause."""
    own = tuple(report for report in case.ranks if not torch_errors.is_victim(report))
    return failures.raised_in(replace(case, ranks=own))


def raised_in_last(error: RankError, issued: Sequence[Collective]) -> bool:
    """Return True where the line of a rank's last collective raised its error."""
    last, line = (issued[-1].place if issued else None), error.at[-1:]
    return last is not None and (last.file, last.line) in [(at.file, at.line) for at in line]


def for_others(diagnosis: Diagnosis, basis: str, unread: Iterable[str] = ()) -> Verdict:
    """The verdict, with remedies that need no session: a magic cannot act on another's job."""
    findings = []
    for finding in diagnosis.findings:
        # A late rank may still come, and then nothing was wrong.
        if finding.passing:
            finding = replace(finding, remedy="Wait, or end the job.", commands=())
        # Rules are written for sessions, and their remedies name magics. None of these can act on a
        # job of others: what remains is the rest of the remedy, or to start the job again.
        elif "%ddp" in finding.remedy:
            rest = [each for each in re.split(r"(?<=\.) ", finding.remedy) if "%ddp" not in each]
            finding = replace(finding, remedy=" ".join(rest) or _AGAIN, commands=())
        findings.append(finding)
    return Verdict(replace(diagnosis, findings=tuple(findings)), basis, tuple(unread))


def places_to_json(
    paths: Mapping[int, tuple[Place, ...]], tree: StackTree | None = None, job: str = ""
) -> dict[str, Any]:
    """By rank, the lines where it is, as a JSON object of the form in ``schema_where.json``.

    With `tree` it has the stacks of its ranks as well, each as ``model/stacks.py`` has it.
    """
    stacks = {} if tree is None else {"stacks": [codec.encode(tree.stack(r)) for r in tree.ranks]}
    return {
        "format": "ddp_notebook places",
        "version": VERSION,
        "job": job,
        "ranks": {str(rank): codec.encode(path) for rank, path in paths.items()},
        **stacks,
    }
