"""The launch parameters of a rank's process, whichever program started it; needs no engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_notebook import model


class Events:
    """Takes a rank's events, and sends them nowhere: a prepared job is asked, and tells nothing.

    `events.EventSender` sends them to a session.
    """

    def __init__(self) -> None:
        self.collect: Callable[[], float | None] = lambda: None
        """Called before each sending; after how many seconds it is to be called again, or None."""
        self.pulse: Callable[[], dict[str, Any]] = dict
        """Gives the fields of a sign of life."""

    def emit(self, kind: type[model.Event], **fields: Any) -> None:
        """Send an event of `kind` about this rank, soon."""

    def emit_now(self, kind: type[model.Event], **fields: Any) -> None:
        """Send it from this thread."""

    def wake(self) -> None:
        """Have `collect` called soon."""


def questions_of(folder: Path, rank: int) -> Path:
    """The socket at which `rank` of a session answers questions; `folder` is the session's."""
    return folder / f"ask-{rank}"


def multiprocessing_folder(folder: Path, pid: int) -> Path:
    """Where multiprocessing in the process `pid` of a rank has its sockets; in `folder`."""
    return folder / f"mp-{pid}"


def started_in(folder: Path) -> Path:
    """The folder of the ranks that a script starts itself; `folder` is the run's own."""
    return folder / "started"


def streams_of(folder: Path, rank: int) -> tuple[Path, Path]:
    """The files behind stdout and stderr of a script's `rank`; `folder` is the run's own."""
    return folder / f"rank-{rank}.out", folder / f"rank-{rank}.err"


@dataclass(eq=False)
class RankProcess:
    """A rank: its number, where its events go, and where its files are.

    It does not change, but for `becomes`.
    """

    rank: int
    events: Events
    folder: Path
    """For files of the rank: its collective log, output that is too long to send."""
    questions: Path
    """The unix socket at which it answers questions."""
    guards: bool = True
    """A collective that does not match what others brought is refused."""

    def becomes(self, rank: int, folder: Path) -> None:
        """In a process that was forked from this one: be another rank, with files in `folder`.

        As of any rank that no session started, nothing of it is refused.
        """
        self.rank, self.folder, self.questions = rank, folder, folder / "ask"
        self.guards = False

    @property
    def collective_log(self) -> Path:
        """Where this rank records its collectives; who asks maps the same file."""
        return self.folder / f"ring-{self.rank}"
