"""The session's ranks, as breakpoints, frames and expressions see them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_notebook.errors import UsageMistake, named_file
from ddp_notebook.model import Ranks, Status
from ddp_notebook.rank.calls import Answer, CannotAnswer, Question, Request
from ddp_notebook.rank.inspect.frames import cell_file
from ddp_notebook.session.guards import existing, living

if TYPE_CHECKING:
    from ddp_notebook.session.pool import RankPool
    from ddp_notebook.session.record import Record
    from ddp_notebook.session.runs.registry import RunRegistry


def as_on_ranks(cell: str) -> str:
    """The text of a cell with its line numbers: in place of its magic it has an empty line."""
    return f"\n{cell.partition(chr(10))[2]}" if cell else ""


class OwnRanks:
    """Those of the session."""

    def __init__(self, record: Record, pool: RankPool, runs: RunRegistry) -> None:
        self._record = record
        self._pool = pool
        self._runs = runs

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._record.snapshot.world_size

    def need(self, verb: str) -> None:
        """Raises UsageMistake when there are no ranks for `verb`."""
        self._pool.need(verb)

    def members(self, ranks: Ranks | None) -> Ranks:
        """These ranks, all by default. Raises UsageMistake when one does not exist."""
        return existing(ranks, self._record.snapshot)

    def alive(self, members: Ranks) -> Ranks:
        """Those of them that have a process."""
        return living(members, self._record.snapshot)

    def ready(self) -> Ranks:
        """All but those that are dead, or being started."""
        states = self._record.snapshot.ranks
        return tuple(s.rank for s in states if s.status not in (Status.DEAD, Status.STARTING))

    def pid(self, rank: int) -> int:
        """The process of a rank."""
        return self._record.snapshot.ranks[rank].pid

    def ask(
        self, ranks: Ranks, question: Question[Request, Answer], request: Request, timeout_s: float
    ) -> dict[int, Answer | CannotAnswer]:
        """Ask them; omits those that miss `timeout_s`."""
        return self._pool.need("%ddp_break").cluster.ask(ranks, question, request, timeout_s)

    def stops(self) -> Mapping[int, int]:
        """The ranks that are paused at lines, and the number of each stop."""
        return {r: s.stop for c in self._runs.controllers for r, s in c.run.stops.items()}

    def moment(self) -> object:
        """A value that changes whenever ranks have moved."""
        return tuple(
            (c.run.cell, c.run.pending, tuple((r, s.stop) for r, s in sorted(c.run.stops.items())))
            for c in self._runs.controllers
        )

    def file(self, name: str) -> Path:
        """A name is relative to the notebook's folder."""
        return named_file(name)

    def latest(self) -> tuple[str, str]:
        """The last cell. Raises UsageMistake when none has run."""
        for controller in reversed(self._runs.controllers):
            run = controller.run
            if not run.script:
                return cell_file(run.number), as_on_ranks(run.sources.get(run.title, ""))
        raise UsageMistake(
            "No cell has run on the ranks yet, so a line alone does not say where. Run it once, "
            "or write breakpoint() in it. Lines of files: %ddp_break train.py:42"
        )

    def cell(self, number: int) -> str:
        """Of the newest that had this number."""
        runs = [c.run for c in self._runs.controllers if not c.run.script]
        texts = (r.sources.get(r.title, "") for r in reversed(runs) if r.number == number)
        return as_on_ranks(next(texts, ""))

    def pause_before_collectives(self) -> None:
        """What runs now is paused there, too."""
        if (current := self._runs.current) is not None:
            current.run.pausing |= not current.run.done
