"""The launch parameters of a rank's process, whichever program started it; needs no engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ddp_notebook import model


class Events(Protocol):
    """Takes a rank's events, as `events.EventSender` does."""

    collect: Callable[[], float | None]
    """Called before each sending; after how many seconds it is to be called again, or None."""
    pulse: Callable[[], dict[str, Any]]
    """Gives the fields of a sign of life."""

    def emit(self, kind: type[model.Event], **fields: Any) -> None:
        """Send an event of `kind` about this rank, soon."""

    def emit_now(self, kind: type[model.Event], **fields: Any) -> None:
        """Send it from this thread."""

    def wake(self) -> None:
        """Have `collect` called soon."""


class NoEvents:
    """Takes events where no session listens: a prepared job is asked, and tells nothing."""

    def __init__(self) -> None:
        self.collect: Callable[[], float | None] = lambda: None
        self.pulse: Callable[[], dict[str, Any]] = dict

    def emit(self, kind: type[model.Event], **fields: Any) -> None:
        """Does nothing: no session listens."""

    def emit_now(self, kind: type[model.Event], **fields: Any) -> None:
        """Does nothing: no session listens."""

    def wake(self) -> None:
        """Nothing is collected."""


def questions_of(folder: Path, rank: int) -> Path:
    """The socket at which `rank` of a session answers questions; `folder` is the session's."""
    return folder / f"ask-{rank}"


def streams_of(folder: Path, rank: int) -> tuple[Path, Path]:
    """The files behind stdout and stderr of a script's `rank`; `folder` is the run's own."""
    return folder / f"rank-{rank}.out", folder / f"rank-{rank}.err"


@dataclass(frozen=True)
class RankProcess:
    """A rank: its number, where its events go, and where its files are."""

    rank: int
    events: Events
    folder: Path
    """For files of the rank: its collective log, output that is too long to send."""
    questions: Path
    """The unix socket at which it answers questions."""
    guards: bool = True
    """A collective that does not match what others brought is refused."""

    @property
    def collective_log(self) -> Path:
        """Where this rank records its collectives; who asks maps the same file."""
        return self.folder / f"ring-{self.rank}"
