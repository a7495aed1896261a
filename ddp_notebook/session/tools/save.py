"""Writes a session's record to a file, also after the session was lost."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from ddp_notebook.archive.format import SavedRun
from ddp_notebook.archive.save import check_target, saved_run, write
from ddp_notebook.errors import NoSession, SessionLost

if TYPE_CHECKING:
    from ddp_notebook.session.record import Record
    from ddp_notebook.session.runs.registry import RunRegistry
    from ddp_notebook.session.tools.why import Why


class Save:
    """Saves the run of a session."""

    def __init__(self, record: Record, runs: RunRegistry, why: Why) -> None:
        self._record = record
        self._runs = runs
        self._why = why

    def save(
        self, path: str | os.PathLike[str], *, output: bool = False, force: bool = False
    ) -> SavedRun:
        """Write the run to `path`, to be read with `Session.replay`; what was written.

        The file is readable by this user alone and written atomically. It contains the ranks'
        output only with `output`; an existing file is replaced only with `force`. Raises
        UsageMistake when it cannot be written there, NoSession when there is nothing.
        """
        target = check_target(path, force)
        if not self._record.snapshot.ranks:
            raise NoSession("%ddp_save")
        case, found = None, None
        # A lost session has no ranks to ask; its record is saved nevertheless.
        # A session that is ending closes its connections during the calls.
        with contextlib.suppress(NoSession, SessionLost, OSError):
            case = self._why.case("%ddp_save")
            found = self._why.diagnose()
        run = self._runs.current
        saved = saved_run(
            *self._record.kept(),
            case,
            found,
            script=run.script if run is not None else "",
            run=run.cell if run is not None else 0,
            output=output,
        )
        write(target, saved, force)
        return saved
