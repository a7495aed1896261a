"""The history of a session's runs: each one's outcome and diagnosis."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_notebook.model import Ranks
from ddp_notebook.session.runs.endings import exits

if TYPE_CHECKING:
    from ddp_notebook.session.runs.run import CellRun

MOST_RUNS = 100


@dataclass(frozen=True, slots=True)
class PastRun:
    """A summary of a run. `exits` says how ranks left it; `pending` are still in it.

    `began` is in seconds since the epoch. `headline` and `category` are those of the finding, empty
    without one.
    """

    title: str
    number: int
    ranks: Ranks
    began: float
    duration_s: float
    exits: Mapping[str, Ranks]
    pending: Ranks = ()
    headline: str = ""
    category: str = ""


class PastRuns:
    """The last runs of a session, the newest last. Of those that are over only a summary is kept.

    Any thread may read them, while one that claims ranks adds to them.
    """

    def __init__(self) -> None:
        self._runs: tuple[tuple[CellRun, float] | PastRun, ...] = ()

    def begin(self, run: CellRun) -> None:
        """Add a run that begins."""
        kept = [
            old if isinstance(old, PastRun) or old[0].pending else _summary(*old)
            for old in self._runs[1 - MOST_RUNS :]
        ]
        self._runs = (*kept, (run, time.time()))

    def clear(self) -> None:
        """Forget them: a session begins."""
        self._runs = ()

    @property
    def runs(self) -> tuple[PastRun, ...]:
        """As they are now."""
        return tuple(old if isinstance(old, PastRun) else _summary(*old) for old in self._runs)


def _summary(run: CellRun, began: float) -> PastRun:
    left_ns, pending, diagnosis = run.events.left_ns, run.pending, run.found.diagnosis
    findings = diagnosis.findings if diagnosis is not None else ()
    end_s = time.monotonic() if pending or not left_ns else max(left_ns.values()) / 1e9
    return PastRun(
        run.title,
        run.cell,
        run.ranks,
        began,
        max(0.0, end_s - run.began_s),
        exits(run.events),
        pending,
        diagnosis.headline if diagnosis is not None and findings else "",
        findings[0].category.value if findings else "",
    )
