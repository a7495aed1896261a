"""Which job the verbs that look at ranks mean, and whether they may act on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ddp_notebook import jobs
from ddp_notebook.errors import UsageMistake

if TYPE_CHECKING:
    from ddp_notebook.jobs.acting import TakenOver
    from ddp_notebook.jobs.targets import Target
    from ddp_notebook.model import Ranks


class Attachment:
    """Which job the verbs that look at ranks mean, when it is not the session's own."""

    def __init__(self) -> None:
        self.current: Target | None = None
        """None: the session's ranks."""
        self.taken_over: TakenOver | None = None
        """The same job, if it was taken over; None: it is only looked at."""

    def attach(
        self, words: Sequence[str], *, slurm: str | None = None, take_over: bool = False
    ) -> Target:
        """Look at what the user names. Raises UsageMistake, and then nothing has changed.

        With `take_over` it can be acted on. One that was before is given back.
        """
        if take_over and slurm is not None:
            raise UsageMistake("A job of Slurm's can only be looked at. Leave out --take-over.")
        if take_over:
            target = jobs.targets.on_this_host(words)
            taken = _taken_over(target)
        else:
            target, taken = jobs.targets.named(words, slurm), None
        self.detach()
        self.current, self.taken_over = target, taken
        return target

    def detach(self) -> Detached:
        """Look at the session's ranks again, and give back what was taken."""
        before, self.current = self.current, None
        taken, self.taken_over = self.taken_over, None
        return Detached(before, taken.give_back() if taken is not None else None)


class Detached(NamedTuple):
    """What was looked at until now; and if it was taken over, which ranks cannot be given back."""

    job: Target | None
    kept: Ranks | None


def _taken_over(target: Target) -> TakenOver:
    if not isinstance(target, jobs.targets.Prepared):
        raise UsageMistake(
            f"Only a job that runs on this host, and was started with DDP_NOTEBOOK=1, can be taken "
            f"over; this is {target.name}. It can only be looked at. If it has just begun, its "
            "ranks may not have imported torch yet: then type it again."
        )
    return jobs.acting.TakenOver(target)
