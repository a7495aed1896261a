"""ipyparallel's engine and controller, as functions that a child can call."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

from ipykernel.iostream import OutStream
from tornado.ioloop import IOLoop

from ddp_notebook.cluster.ipyparallel_private import keep_heart_in_process
from ddp_notebook.launch.child import die_with_parent
from ddp_notebook.rank import engine_private, runtime


class EngineStream(OutStream):  # type: ignore[misc]
    """ipykernel's stream, without the pipes that replace the process's own stdout and stderr.

    Those stay the rank's log file: a message of C code that aborts the process is then
    never lost in a pipe.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "watchfd": False})


def engine(argv: Sequence[str]) -> None:
    """Run an ipyparallel engine until it is told to stop."""
    from ipyparallel.engine.app import IPEngine

    engine_private.list_no_modules()
    sys.argv = ["ipengine", *argv]
    app = IPEngine.instance()
    app.initialize(list(argv))
    serve = app.start
    while True:
        try:
            serve()
        except SystemExit as stop:
            if not _by_a_callback_of_the_user(stop):
                raise
            serve = app.loop.start
        else:
            return


def _by_a_callback_of_the_user(stop: SystemExit) -> bool:
    """True for an error of an event loop callback, which is printed and ends nothing."""
    if not runtime.current().is_of_user(stop):
        return False
    traceback.print_exception(stop)
    what = "sys.exit() in a callback of the event loop ends the callback, not the rank"
    sys.stderr.write(f"{what}\n")
    return True


def controller(argv: Sequence[str]) -> None:
    """Run an ipyparallel controller until it is told to stop."""
    from ipyparallel.controller.app import IPController

    if hasattr(os, "fork"):
        # If the heart monitor is a child process, it is forked (spawning one costs a second), and
        # must not outlive a killed controller.
        multiprocessing.set_start_method("fork", force=True)
        os.register_at_fork(after_in_child=lambda: die_with_parent(os.getppid()))
    keep_heart_in_process()
    ignore_the_wall_clock()
    sys.argv = ["ipcontroller", *argv]
    IPController.launch_instance(argv=list(argv))


def ignore_the_wall_clock() -> None:
    """Have the event loops of this process measure time by the monotonic clock.

    By default tornado's do so by the wall clock: once that is set back, the heart monitor stands
    still until it is as late again, and no new engine is registered meanwhile.
    """
    IOLoop.time = lambda _: time.monotonic()
