"""Errors of the user's threads: shown like what the cell raises, and kept for the report."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable

from ddp_notebook import model, syntax
from ddp_notebook.rank.cells.raised import in_thread
from ddp_notebook.rank.component import Component, Run
from ddp_notebook.rank.inspect.frames import UserCode
from ddp_notebook.rank.main_thread import Aborted

_MOST = 4


class ThreadErrors(Component):
    """Errors that ended threads in the run that goes on, or was the last; the first few.

    `show` shows such a text, unless it returns False: then Python shows the error.
    """

    def __init__(self, show: Callable[[str], bool], user_code: UserCode) -> None:
        self.of_run: tuple[model.ThreadError, ...] = ()
        self._show = show
        self._pid = 0
        self._user_code = user_code

    def attach(self) -> None:
        """Once: Python tells of a thread that an error ended."""
        otherwise, self._pid = threading.excepthook, os.getpid()

        def take(error: threading.ExceptHookArgs) -> None:
            if error.exc_type is SystemExit or os.getpid() != self._pid:
                otherwise(error)
                return
            if error.exc_type is Aborted:
                return  # it was ended because the user wanted that
            name = error.thread.name if error.thread is not None else "?"
            about = error.exc_type, error.exc_value, error.exc_traceback
            lines = syntax.alone(lambda: traceback.format_exception(*about))  # it parses a line
            if not self._show(f"Exception in thread {name}:\n{''.join(lines)}"):
                otherwise(error)
            if error.exc_value is not None and len(self.of_run) < _MOST:
                raised = in_thread(name, error.exc_value, self._user_code)
                self.of_run = (*self.of_run, raised)

        threading.excepthook = take

    def run_begins(self, run: Run) -> None:
        """Threads of the last run may go on; what ended them then does not count any more."""
        self.of_run = ()

    def in_main(self) -> model.ThreadError | None:
        """Return the error that the main thread is handling; None for nothing of the user's."""
        error: object = sys._current_exceptions().get(threading.main_thread().ident or 0)
        error = error[1] if isinstance(error, tuple) else error  # before Python 3.12
        if not isinstance(error, Exception):
            return None
        raised = in_thread("main", error, self._user_code)
        return raised if raised.path else None
