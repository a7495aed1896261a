"""The errors that magics and `Session` raise. Each message says what happened, why, what to type.

Catch `DDPError` for all of them, or one of:

    DDPError
     ├── UsageMistake        the call was wrong; nothing was done
     │    └── NoSession      there are no ranks yet
     ├── CellSyntaxError     a cell is not valid Python; no rank ran it
     ├── SetupFailed         setup started and could not finish
     ├── CellFailed          a cell or script failed on some ranks
     ├── Stuck               ranks wait for what will never happen; the diagnosis says why
     ├── CellInterrupted     the user interrupted a cell, script or benchmark
     └── SessionLost         the session's processes have ended
"""

from __future__ import annotations

import os
from pathlib import Path

from ddp_notebook.model import Board, Diagnosis, Ranks


class DDPError(Exception):
    """Base of all errors that this package raises for a person to read.

    IPython shows the message only, without the traceback through the package.
    """

    def _render_traceback_(self) -> list[str]:
        """Called by IPython instead of formatting the traceback."""
        return [f"{type(self).__name__}: {self}"]


class UsageMistake(DDPError):
    """The call was wrong and nothing was done: an unknown option, a rank that does not exist.

    Type the call that the message shows instead.
    """


class NoSession(UsageMistake):
    """`verb` needs ranks, and was used before `%ddp_init` or after `%ddp_shutdown`.

    Type `%ddp_init` first.
    """

    def __init__(self, verb: str) -> None:
        super().__init__(
            f"{verb} needs ranks, and none are running. Start them first: %ddp_init --world-size 4"
        )


class CellSyntaxError(DDPError):
    """A cell cannot be compiled, so no rank has run any of it. Correct line `line` of the cell."""

    def __init__(self, error: SyntaxError) -> None:
        source = (error.text or "").rstrip()
        # The caret stands below the column of the error, in the line without its indentation.
        indent = len(source) - len(source.lstrip())
        caret = " " * max(0, (error.offset or 1) - 1 - indent) + "^"
        shown = f"\n    {source.lstrip()}\n    {caret}" if source else ""
        super().__init__(f"{error.msg} (cell line {error.lineno}); no rank ran the cell{shown}")
        self.line = error.lineno or 0


class SetupFailed(DDPError):
    """`%ddp_init` or a restart started and could not finish.

    `board` and `diagnosis` show how far each rank was and what is wrong; None if not known. The
    ranks that live are kept: type `%ddp_why`, then `%ddp_init` again.
    """

    def __init__(
        self, message: str, board: Board | None = None, diagnosis: Diagnosis | None = None
    ) -> None:
        super().__init__(message)
        self.board = board
        self.diagnosis = diagnosis


class CellFailed(DDPError):
    """A cell or script raised an exception on `ranks`, or their processes died.

    The other ranks finished it. `diagnosis` names the culprit; None if that is not known. Dead
    ranks get new processes with `%ddp_restart`. `shown`: the tracebacks stand above, so IPython
    shows `brief`, which does not repeat what the exceptions say.
    """

    def __init__(self, message: str, ranks: Ranks, brief: str = "") -> None:
        super().__init__(message)
        self.ranks = ranks
        self.brief = brief or message
        self.diagnosis: Diagnosis | None = None
        self.shown = False

    def _render_traceback_(self) -> list[str]:
        return [f"CellFailed: {self.brief}"] if self.shown else super()._render_traceback_()


class Stuck(DDPError):
    """A cell or script ended because its ranks wait for something that will never happen.

    `diagnosis` says which ranks are the culprits and why. `%ddp_abort` frees the ranks. `shown`:
    the diagnosis stands above, so IPython shows only what the ranks do now and what to type.
    """

    def __init__(self, message: str, diagnosis: Diagnosis) -> None:
        super().__init__(message)
        self.diagnosis = diagnosis
        self.shown = False

    def _render_traceback_(self) -> list[str]:
        if not self.shown:
            return super()._render_traceback_()
        return [f"Hang: no rank can continue. {str(self).splitlines()[-1]}"]


class CellInterrupted(DDPError):
    """The user pressed Ctrl-C, or interrupted the kernel, while ranks ran a cell.

    `still_running` are the ranks that go on running it: `%ddp_wait` waits for them, `%ddp_abort`
    ends it.
    """

    def __init__(self, message: str, still_running: Ranks) -> None:
        super().__init__(message)
        self.still_running = still_running


class SessionLost(DDPError):
    """The session's processes have ended, and the ranks' variables with them.

    `%ddp_init` starts new ones.
    """


def named_file(path: str | os.PathLike[str]) -> Path:
    """The file that a user named. Raises UsageMistake where no file can have that name."""
    try:
        file = Path(path).expanduser()
        os.fsencode(file)
    except (RuntimeError, ValueError) as error:  # unknown user's home; unpaired surrogate
        raise UsageMistake(f"{str(path)!r} cannot be the name of a file: {error}") from None
    if "\0" in str(file):
        raise UsageMistake(f"{str(path)!r} cannot be the name of a file: it has a null character.")
    return file
