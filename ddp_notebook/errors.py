"""What a wrong call raises.

Every message says what happened, why, and what to type. A job that goes wrong is not an
error of the call: that is shown on the board.

    DDPError
     ├── UsageMistake        the call was wrong; nothing was done
     │    └── NoSession      there are no ranks yet
     ├── CellSyntaxError     a cell is not Python; no rank ran it
     ├── SetupFailed         %ddp_init began and could not finish
     ├── CellFailed          a cell raised, died or was lost on some ranks
     ├── Stuck               ranks wait for what will not come; a diagnosis says why
     ├── CellInterrupted     the user interrupted a cell
     └── SessionLost         the session's processes are gone
"""

from __future__ import annotations

from ddp_notebook.model import Board, Diagnosis, Ranks


class DDPError(Exception):
    """Base of all errors this package raises for a person to read.

    IPython shows the message alone: the stack inside the package helps nobody.
    """

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class UsageMistake(DDPError):
    """The call was wrong and nothing was done. The message holds the call to type instead."""


class NoSession(UsageMistake):
    """A verb that needs ranks was called before `%ddp_init`, or after `%ddp_shutdown`."""

    def __init__(self, verb: str) -> None:
        super().__init__(
            f"{verb} needs ranks, and there are none. Start them first: %ddp_init --world-size 4"
        )


class CellSyntaxError(DDPError):
    """A cell cannot be compiled. It was found out here; no rank has run any of it."""

    def __init__(self, error: SyntaxError) -> None:
        source = (error.text or "").rstrip()
        indent = len(source) - len(source.lstrip())
        caret = " " * max(0, (error.offset or 1) - 1 - indent) + "^"
        shown = f"\n    {source.lstrip()}\n    {caret}" if source else ""
        super().__init__(f"{error.msg} (cell line {error.lineno}); no rank ran the cell{shown}")
        self.line = error.lineno or 0


class SetupFailed(DDPError):
    """Set-up began and did not finish; `board` and `diagnosis` say how it stood, if known."""

    def __init__(
        self, message: str, board: Board | None = None, diagnosis: Diagnosis | None = None
    ) -> None:
        super().__init__(message)
        self.board = board
        self.diagnosis = diagnosis


class CellFailed(DDPError):
    """A cell raised, died or was not run on `ranks`. The other ranks finished it.

    `diagnosis` says whose fault it was, where that could be found out.
    """

    def __init__(self, message: str, ranks: Ranks) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.diagnosis: Diagnosis | None = None


class Stuck(DDPError):
    """Ranks wait for what no rank will bring; `diagnosis` says whose fault it is."""

    def __init__(self, message: str, diagnosis: Diagnosis) -> None:
        super().__init__(message)
        self.diagnosis = diagnosis


class CellInterrupted(DDPError):
    """The user interrupted a cell; `still_running` are the ranks that have not left it."""

    def __init__(self, message: str, still_running: Ranks) -> None:
        super().__init__(message)
        self.still_running = still_running


class SessionLost(DDPError):
    """The processes behind the session ended; `%ddp_init` starts new ones."""
