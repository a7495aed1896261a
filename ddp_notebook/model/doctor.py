"""The report of `%ddp_doctor`: one line per check, each with a verdict and a remedy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ddp_notebook.model import codec
from ddp_notebook.model.ranks import counted


class Verdict(StrEnum):
    """How a check ended, mildest first; the value is what is shown and exported."""

    OK = "ok"
    """No obstacle for DDP."""
    WARNING = "warning"
    """DDP can start, but this may cause problems, or makes it slow."""
    FAILURE = "failure"
    """The requested setup cannot work until this is fixed."""

    @property
    def severity(self) -> int:
        """0 for ok, 2 for failure."""
        return list(Verdict).index(self)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    `found` is the result, on one line. `remedy` is what to type or to do; empty if the check is ok.
    """

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""

    @classmethod
    def ok(cls, name: str, found: str) -> Check:
        """A check that found nothing wrong."""
        return cls(name, Verdict.OK, found)

    @classmethod
    def warning(cls, name: str, found: str, remedy: str) -> Check:
        """A check that found a possible problem."""
        return cls(name, Verdict.WARNING, found, remedy)

    @classmethod
    def failure(cls, name: str, found: str, remedy: str) -> Check:
        """A check that found a failure."""
        return cls(name, Verdict.FAILURE, found, remedy)


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """All checks, in the order they were made.

    `world_size` (0: not said) and `backend` are what was asked about.
    """

    checks: tuple[Check, ...]
    world_size: int = 0
    backend: str = "auto"

    @property
    def ok(self) -> bool:
        """True when DDP can work here: no check failed. There may be warnings."""
        return self.worst is not Verdict.FAILURE

    @property
    def worst(self) -> Verdict:
        """The worst verdict; ok when nothing was checked."""
        verdicts = (check.verdict for check in self.checks)
        return max(verdicts, key=lambda verdict: verdict.severity, default=Verdict.OK)

    def count(self, verdict: Verdict) -> int:
        """How many checks ended so."""
        return sum(check.verdict is verdict for check in self.checks)

    @property
    def headline(self) -> str:
        """The report in one line."""
        failures, warnings = self.count(Verdict.FAILURE), self.count(Verdict.WARNING)
        found = [
            counted(number, word)
            for number, word in ((failures, "failure"), (warnings, "warning"))
            if number
        ]
        asked = f"{self.world_size} rank{'s' if self.world_size != 1 else ''}"
        about = f" ({asked}, backend {self.backend})" if self.world_size else ""
        can = "DDP can work here" if self.ok else "DDP cannot work here as it is"
        checks = counted(len(self.checks), "check")
        return f"{can}{about}: " + (
            f"{', '.join(found)} in {checks}" if found else f"{checks}, all ok"
        )

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object, of the form in ``doctor/schema.json``."""
        return {
            "format": "ddp_notebook doctor",
            "version": 1,
            "ok": self.ok,
            "worst": self.worst.value,
            "headline": self.headline,
            **codec.encode(self),
        }

    def __str__(self) -> str:
        return json.dumps(self.to_json(), indent=2)
