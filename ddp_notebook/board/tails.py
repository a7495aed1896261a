"""What the ranks issue while they issue it: the new ends of their collective logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_notebook.model import Collective, Collectives, Ranks

if TYPE_CHECKING:
    from ddp_notebook.session.collective_logs import CollectiveLogs
    from ddp_notebook.session.runs.run import CellRun


class Tails:
    """Follows one run after another. Not for several threads at once."""

    def __init__(self) -> None:
        self.run = 0
        """The number of the run that is followed."""
        self._kept: dict[int, dict[int, Collective]] = {}
        self._next: dict[int, int] = {}
        self._groups: dict[str, Ranks] = {}

    def follow(self, logs: CollectiveLogs, run: CellRun) -> tuple[Collective, ...]:
        """The records of `run` that are new or have changed since the last call."""
        if run.cell != self.run:
            self.run, self._kept, self._next, self._groups = run.cell, {}, {}, {}
        # Of more than 512 new records of a rank the oldest are skipped.
        found = logs.read_since(run.ranks, run.cell, self._next, 512)
        self._groups.update(found.groups)
        news = [record for rank, records in found.of.items() for record in self._new(rank, records)]
        return tuple(news)

    @property
    def collectives(self) -> Collectives:
        """The newest records of each rank."""
        return Collectives(
            {rank: tuple(kept.values()) for rank, kept in self._kept.items()}, dict(self._groups)
        )

    def _new(self, rank: int, records: tuple[Collective, ...]) -> list[Collective]:
        kept = self._kept.setdefault(rank, {})
        news = [record for record in records if kept.get(record.number) != record]
        kept.update((record.number, record) for record in news)
        # The newest 256 of a rank are enough to describe what it does.
        for number in list(kept)[: max(0, len(kept) - 256)]:
            del kept[number]
        end = max(kept, default=-1) + 1
        # Pending records are read again, as they may have changed; but work that no code waits for
        # is never seen to be done, so only the newest 64 are.
        pending = [n for n, record in kept.items() if n >= end - 64 and not record.over]
        self._next[rank] = min([*pending, end])
        return news
