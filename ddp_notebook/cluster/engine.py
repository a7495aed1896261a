"""ipyparallel's engine, as a function that a child can call."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

from ipykernel.iostream import OutStream

from ddp_notebook.rank import engine_private, runtime

_LIBRARIES = (
    "IPython",
    "ipykernel",
    "ipyparallel",
    "jupyter_client",
    "tornado",
    "traitlets",
    "zmq",
)
"""The parts of an engine."""


class EngineStream(OutStream):  # type: ignore[misc]
    """ipykernel's stream, without the pipes that replace the process's own stdout and stderr.

    Those stay the rank's log file: a message of C code that aborts the process is then
    never lost in a pipe.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "watchfd": False})


def engine(argv: Sequence[str]) -> None:
    """Run an ipyparallel engine until it is stopped."""
    from ipyparallel.engine.app import IPEngine

    engine_private.list_no_modules()
    engine_private.configure_one_logger()
    let_libraries_warn()
    sys.argv = ["ipengine", *argv]
    app = IPEngine.instance()
    app.initialize(list(argv))
    del sys.argv[1:]  # a program in a cell would parse them
    serve = app.start
    while True:
        try:
            serve()
        except SystemExit as stop:
            if not runtime.is_of_user(stop):
                raise
            # Of a callback of the event loop: it is printed as any other error of one.
            traceback.print_exception(stop)
            what = "sys.exit() in a callback of the event loop ends the callback, not the rank"
            sys.stderr.write(f"{what}\n")
            # asyncio passes SystemExit on out of its loop, and the loop can go on from there. The
            # engine has been registered: `app.start` would do that a second time.
            serve = app.loop.start
        else:
            return


def let_libraries_warn() -> None:
    """Where warnings are errors, as with PYTHONWARNINGS=error: not those of `_LIBRARIES`.

    ipykernel warns of what ipyparallel does: as an error it would end the rank. The user's stay so.
    """
    if any(action == "error" for action, *_ in warnings.filters):
        for name in _LIBRARIES:
            warnings.filterwarnings("ignore", module=rf"{name}(\.|$)")
