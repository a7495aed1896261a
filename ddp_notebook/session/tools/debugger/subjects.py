"""Whose ranks are stopped at lines: the session's own, or those of a job that was taken over."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ddp_notebook.errors import UsageMistake, named_file
from ddp_notebook.model import Ranks, Status
from ddp_notebook.rank.calls import Answer, CannotAnswer, Question, Request
from ddp_notebook.rank.inspect.frames import cell_file
from ddp_notebook.session.guards import existing, living

if TYPE_CHECKING:
    from ddp_notebook.jobs.acting import TakenOver
    from ddp_notebook.session.pool import RankPool
    from ddp_notebook.session.record import Record
    from ddp_notebook.session.runs.registry import RunRegistry


class Subject(Protocol):
    """Ranks that can be stopped at lines."""

    has_cells: bool
    """They run cells of this notebook."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""

    def need(self, verb: str) -> None:
        """Raises UsageMistake when there are no ranks for `verb`."""

    def members(self, ranks: Ranks | None) -> Ranks:
        """These ranks, all by default. Raises UsageMistake when one does not exist."""

    def alive(self, members: Ranks) -> Ranks:
        """Those of them that have a process."""

    def ready(self) -> Ranks:
        """All that can be given breakpoints."""

    def pid(self, rank: int) -> int:
        """The process of a rank."""

    def ask(
        self, ranks: Ranks, question: Question[Request, Answer], request: Request, timeout_s: float
    ) -> dict[int, Answer | CannotAnswer]:
        """Ask them; omits those that miss `timeout_s`."""

    def stops(self) -> Mapping[int, int]:
        """The ranks that are paused at lines, and the number of each stop."""

    def moment(self) -> object:
        """A value that changes whenever ranks have moved."""

    def file(self, name: str) -> Path:
        """The file that the user names; it may not be there."""

    def latest(self) -> tuple[str, str]:
        """What a line alone is in: a file name as the ranks have it, and its text if it is a cell.

        Raises UsageMistake when there is none.
        """

    def cell(self, number: int) -> str:
        """The text of that cell as ranks have it; empty where it is not known."""

    def pause_before_collectives(self) -> None:
        """A breakpoint was set on collectives: what runs now is paused there, too."""


def as_on_ranks(cell: str) -> str:
    """The text of a cell with its line numbers: in place of its magic it has an empty line."""
    return f"\n{cell.partition(chr(10))[2]}" if cell else ""


class OwnRanks:
    """Those of the session."""

    has_cells = True

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
        return {rank: at.stop for rank, at in self._runs.stops.items()}

    def moment(self) -> object:
        """A value that changes whenever ranks have moved."""
        return tuple(
            (run.cell, run.pending, tuple((r, s.stop) for r, s in sorted(run.stops.items())))
            for run in self._runs.all
        )

    def file(self, name: str) -> Path:
        """A name is relative to the notebook's folder."""
        return named_file(name)

    def latest(self) -> tuple[str, str]:
        """The last cell. Raises UsageMistake when none has run."""
        for run in reversed(self._runs.all):
            if not run.script:
                return cell_file(run.number), as_on_ranks(run.sources.get(run.title, ""))
        raise UsageMistake(
            "No cell has run on the ranks yet, so a line alone does not say where. Run it once, "
            "or write breakpoint() in it. Lines of files: %ddp_break train.py:42"
        )

    def cell(self, number: int) -> str:
        """Of the newest that had this number."""
        runs = [run for run in self._runs.all if not run.script]
        texts = (r.sources.get(r.title, "") for r in reversed(runs) if r.number == number)
        return as_on_ranks(next(texts, ""))

    def pause_before_collectives(self) -> None:
        """What runs now is paused there, too."""
        if (current := self._runs.current) is not None:
            current.pausing |= not current.done


class JobRanks:
    """Those of a job that was taken over."""

    has_cells = False

    def __init__(self, taken: TakenOver) -> None:
        self._taken = taken

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._taken.world_size

    def need(self, verb: str) -> None:
        """Raises UsageMistake when none of its ranks runs any more."""
        if not self._taken.obeying():
            raise UsageMistake(
                f"{self._taken.name} has no rank that can be told anything: {verb} needs one. "
                "What is known of it: %ddp_why. Leave it: %ddp_detach"
            )

    def members(self, ranks: Ranks | None) -> Ranks:
        """These ranks, all by default; they exist."""
        return ranks if ranks is not None else tuple(range(self.world_size))

    def alive(self, members: Ranks) -> Ranks:
        """Those of them that have a process."""
        return tuple(rank for rank in members if rank in self._taken.alive)

    def ready(self) -> Ranks:
        """All that obey."""
        return self._taken.obeying()

    def pid(self, rank: int) -> int:
        """The process of a rank."""
        return self._taken.pid(rank)

    def ask(
        self, ranks: Ranks, question: Question[Request, Answer], request: Request, timeout_s: float
    ) -> dict[int, Answer | CannotAnswer]:
        """Ask them; omits those that miss `timeout_s`."""
        return self._taken.ask(ranks, question, request, timeout_s)

    def stops(self) -> Mapping[int, int]:
        """The ranks that are paused at lines, and the number of each stop."""
        return {rank: stop.stop for rank, stop in self._taken.stops().items()}

    def moment(self) -> object:
        """A value that changes whenever ranks have moved."""
        return tuple(sorted(self.stops().items()))

    def file(self, name: str) -> Path:
        """A name is relative to the folder in which the job was started."""
        there = self._taken.folder / named_file(name)
        return there if there.is_file() else named_file(name)

    def latest(self) -> tuple[str, str]:
        """Its script."""
        return self._taken.script, ""

    def cell(self, number: int) -> str:
        """It has none."""
        return ""

    def pause_before_collectives(self) -> None:
        """Each rank pauses there by itself."""
