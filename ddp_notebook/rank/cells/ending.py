"""Reports how a cell or a script ended on this rank."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from torch.distributed import is_initialized  # this one, whatever a cell puts there

from ddp_notebook.launch.child import exit_code
from ddp_notebook.model import CellFinished, Place
from ddp_notebook.rank.cells import raised
from ddp_notebook.rank.cells.output import OutputForwarder
from ddp_notebook.rank.core import RankCore
from ddp_notebook.rank.events import EventSender
from ddp_notebook.rank.main_thread import Failure
from ddp_notebook.rank.setup.errors import Refused


class Ending:
    """Notifies the session, and keeps the outcome for a report."""

    def __init__(self, core: RankCore, events: EventSender, forwarder: OutputForwarder) -> None:
        self._core = core
        self._events = events
        self._forwarder = forwarder
        self._pid = os.getpid()

    def say(
        self,
        run: int,
        error: BaseException | None,
        file: str,
        run_ends: Callable[[], None],
        left: tuple[Place, ...] = (),
        *,
        in_cell: bool = False,
    ) -> None:
        """The run of `file` ended, with `error` or well, by sys.exit() where it `left` it.

        First call `run_ends`.

        If that cannot be reported any more, the process ends; so does one that the run has forked,
        as behind the last line of a program: going on, it would take the rank's messages.
        """
        if os.getpid() != self._pid:
            os._exit(exit_code(error))
        try:
            run_ends()
            failure = self._keep(error) if error is not None else Failure("", "")
            outcome = "ok"
            if error is not None:
                outcome = "interrupted" if raised.is_interrupt(error) else "error"
            how: dict[str, Any] = {
                "outcome": outcome,
                "ename": failure.type,
                "evalue": failure.text,
                "line": raised.line_of(error, file),
                "path": tuple(map(raised.place_of, failure.frames)) or left,
                "withheld_bytes": self._forwarder.withheld_bytes,
                "trained": self._core.hooks.trained(),
                # A script ends with its process.
                "no_group": in_cell and not is_initialized(),
            }
        except Exception as broken:  # noqa: BLE001  # the user's code replaced what that needs
            how = {"outcome": "error", "ename": type(broken).__name__, "evalue": str(broken)}
        try:
            self._events.emit_now(CellFinished, cell=run, **how)
        except Exception:  # noqa: BLE001  # silent, the session would wait for this rank forever
            traceback.print_exc(file=sys.__stderr__)
            os._exit(1)

    def stop_at(self, error: BaseException | None) -> None:
        """The cell or script is about to end with `error`: the debugger may stop here before."""
        if error is not None and not raised.is_interrupt(error):
            self._keep(error)
            self._core.debugger.raised(error)

    def _keep(self, error: BaseException) -> Failure:
        """How the last run failed, available until something runs again."""
        core, before = self._core, error.__context__
        *_, own = raised.wrapped(error, core.user_code)
        failure = Failure(
            type(own).__name__,
            raised.message_of(own),
            category=own.category if isinstance(own, Refused) else "",
            remedy=own.remedy if isinstance(own, Refused) else "",
            frames=raised.frames_of(error, core.user_code),
            during=raised.in_thread("main", before, core.user_code)
            if isinstance(before, Exception) and own is error
            else None,
            path=raised.missing_path(own),
            trace=error.__traceback__,
        )
        core.main_thread.error = failure
        return failure
