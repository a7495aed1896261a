"""A job that was not prepared, as what `why`, `where` and the board look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ddp_notebook.archive.format import Observed, SavedRun
from ddp_notebook.errors import UsageMistake
from ddp_notebook.jobs import picture, unprepared
from ddp_notebook.jobs.outside.job import Outside, look
from ddp_notebook.jobs.stacks import stack_of
from ddp_notebook.jobs.unprepared import Seen
from ddp_notebook.jobs.verdict import Verdict
from ddp_notebook.model import Board, Local, Place, Ranks, RankStack, StackTree, name_ranks
from ddp_notebook.state import stack_tree
from ddp_notebook.views.ansi import plain


class Unprepared:
    """A job that was not prepared; every question looks at it anew, from outside."""

    def __init__(self, ranks: Mapping[int, Seen], pid: int) -> None:
        self._pid = pid
        self._ranks = ranks

    @property
    def name(self) -> str:
        """Its pid, as it was given, and its script."""
        script = plain(Path(next(iter(self._ranks.values())).script).name)
        return f"job {self._pid} ({script or 'python'})"

    @property
    def about(self) -> str:
        """Its ranks, and how it was started."""
        was_set = any(unprepared.was_set(seen.pid) for seen in self._ranks.values())
        how = "not prepared, or not yet," if was_set else "started without DDP_NOTEBOOK=1"
        folder = unprepared.elsewhere(next(iter(self._ranks.values())).pid) if was_set else ""
        seen = f"{name_ranks(self._ranks)} of {self.world_size}, {how} and seen from outside"
        return f"{seen}. {folder}".rstrip(". ")

    @property
    def world_size(self) -> int:
        """As the ranks were told."""
        return max(*self._ranks, *(process.world_size - 1 for process in self._ranks.values())) + 1

    def why(self) -> Verdict:
        """What is wrong with it, as far as stacks prove it."""
        return self._look().verdict()

    def where(self, ranks: Ranks | None = None, locals: bool = False) -> StackTree:
        """The stacks of `ranks`; with `locals` the variables of the user's frames."""
        outside = self._look(twice=False)
        wanted = [e for e in outside.case.ranks if ranks is None or e.rank in ranks]
        found = [stack_of(report, over=False) for report in wanted]
        if locals:
            found = [_with_variables(stack, outside.variables(stack.rank)) for stack in found]
        return stack_tree.merge(found, self.world_size)

    def places(self) -> Mapping[int, tuple[Place, ...]]:
        """The lines of `where`."""
        reports = self._look(twice=False).case.ranks
        return {report.rank: report.path for report in reports if report.path}

    def board(self) -> Board:
        """What is seen of each rank, in a row."""
        outside = self._look()
        headline = f"{self.name}: {self.about}"
        return picture.board(outside.case, headline, outside.verdict().diagnosis)

    def saved(self) -> SavedRun:
        """What is seen of it."""
        outside = self._look()
        observed = Observed(self.name, self.about, ranks=tuple(self._ranks))
        return picture.saved(outside.case, outside.verdict(), False, observed)

    def _look(self, twice: bool = True) -> Outside:
        present = unprepared.job_of(self._pid, frozenset())
        if present is None:
            raise UsageMistake(f"{self.name} has ended. What there is: %ddp_attach")
        self._ranks = present
        return look(present, twice)


def _with_variables(stack: RankStack, variables: Mapping[int, tuple[Local, ...]]) -> RankStack:
    frames = (
        replace(frame, locals=variables.get(number, ()))
        for number, frame in enumerate(stack.frames)
    )
    return replace(stack, frames=tuple(frames))
