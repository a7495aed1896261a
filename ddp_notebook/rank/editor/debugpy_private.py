"""Every use of debugpy, and of the pydevd in it, each checked before use.

Public are `connect`, `configure` and `debug_this_thread`. That a thread which is paused already is
handed over, and that one which an editor left stays where it is, needs what pydevd has inside.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any

from ddp_notebook.rank.calls import How

_MONITORING = "_pydevd_sys_monitoring.pydevd_sys_monitoring"
_NEEDED = {
    "debugpy": ("connect", "configure", "debug_this_thread"),
    "pydevd": (
        "PyDB.do_wait_suspend",
        "PyDB.set_suspend",
        "PyDB.add_dap_messages_listener",
        "IDAPMessagesListener",
        "stoptrace",
        "get_global_debugger",
    ),
    "_pydevd_bundle.pydevd_api": ("PyDevdAPI.set_dont_trace_start_end_patterns",),
    "_pydevd_bundle.pydevd_additional_thread_info": ("set_additional_thread_info",),
    "_pydevd_bundle.pydevd_thread_lifecycle": ("resume_threads",),
    "_pydevd_bundle.pydevd_constants": ("STATE_RUN", "STATE_SUSPEND"),
    "_pydevd_bundle.pydevd_comm_constants": (
        "CMD_SET_BREAK",
        "CMD_STEP_OVER",
        "CMD_STEP_INTO",
        "CMD_STEP_RETURN",
    ),
}
"""By module, what is used of it. All but debugpy's own are private."""
if hasattr(sys, "monitoring"):  # from Python 3.12 on
    _NEEDED[_MONITORING] = ("stop_monitoring", "start_monitoring")
_STEPS = {How.NEXT: "CMD_STEP_OVER", How.INTO: "CMD_STEP_INTO", How.OUT: "CMD_STEP_RETURN"}
_OURS = str(Path(__file__).parents[2])
_NO_CHECK = "PYDEVD_DISABLE_FILE_VALIDATION"
"""Of the environment, while it is loaded: else it warns of frozen modules on the rank's stderr."""

Suspend = Callable[[], None]
"""Has the thread that calls it wait in pydevd, until that resumes it."""


def is_installed() -> bool:
    """Whether debugpy can be imported."""
    return importlib.util.find_spec("debugpy") is not None


class Debugpy:
    """debugpy in this process.

    `on_suspend` is called in a thread that it stops, with its frame and what waits there;
    `on_leave` before threads are resumed because the editor leaves.
    """

    def __init__(
        self, on_suspend: Callable[[FrameType, Suspend], None], on_leave: Callable[[], None]
    ) -> None:
        self._on_suspend = on_suspend
        self._on_leave = on_leave
        self._parts: dict[str, Any] = {}
        self._plain: Any = None

    def load(self) -> str:
        """Import it; what this release lacks of what is needed, empty for nothing."""
        if self._plain is not None:
            return ""
        had = os.environ.get(_NO_CHECK)
        os.environ[_NO_CHECK] = "1"
        try:
            importlib.import_module("debugpy.server.api")
        except ImportError as error:
            return f"its part {error.name}"
        finally:
            if had is None:
                os.environ.pop(_NO_CHECK, None)
        parts = {name: sys.modules.get(name) for name in _NEEDED}  # it has imported them all
        for name, wanted in _NEEDED.items():
            for each in wanted:
                try:
                    attrgetter(each)(parts[name])
                except AttributeError:
                    return f"{name}.{each}"
        self._parts = parts
        self._stand_in()
        return ""

    def _stand_in(self) -> None:
        """Hear of each thread that pydevd stops."""
        kind = self._parts["pydevd"].PyDB
        self._plain = plain = kind.do_wait_suspend
        on_suspend = self._on_suspend

        def do_wait_suspend(db: Any, thread: Any, frame: Any, *args: Any, **named: Any) -> None:
            if thread is not threading.current_thread():
                plain(db, thread, frame, *args, **named)
                return
            on_suspend(frame, lambda: plain(db, thread, frame, *args, **named))

        kind.do_wait_suspend = do_wait_suspend

    # -- its life --------------------------------------------------------------------------

    def connect(self, host: str, port: int) -> None:
        """Connect to an editor that listens there; returns when that has set its breakpoints."""
        _leave_alone_what_is_ours()
        debugpy = self._parts["debugpy"]
        debugpy.configure(subProcess=False)
        debugpy.connect((host, port))
        if (db := self._db) is not None:
            db.add_dap_messages_listener(self._listener())
            hidden = (str(Path(debugpy.__file__).parent), _OURS)
            api = self._parts["_pydevd_bundle.pydevd_api"].PyDevdAPI()
            api.set_dont_trace_start_end_patterns(db, hidden, ())

    @property
    def _db(self) -> Any:
        return self._parts["pydevd"].get_global_debugger()

    def _listener(self) -> Any:
        on_leave = self._on_leave

        class Listener(self._parts["pydevd"].IDAPMessagesListener):  # type: ignore[misc]
            def after_receive(self, message: dict[str, Any]) -> None:
                """An editor that leaves does not end the rank, whatever it is set to."""
                if message.get("command") in ("disconnect", "terminate"):
                    message["command"] = "disconnect"
                    message["arguments"] = {"terminateDebuggee": False}
                    on_leave()

        return Listener()

    def leave(self) -> None:
        """Have no debugger in this process any more; `untrace` each thread that was stopped."""
        if (db := self._db) is not None:
            db.ready_to_run = True  # else who waits in `connect` does so for ever
        self._parts["pydevd"].stoptrace()

    def leave_child_alone(self) -> None:
        """This process is a forked child: nothing is stopped in it."""
        if self._parts and (db := self._db) is not None:
            db.pydb_disposed = True
            self.untrace()

    def untrace(self) -> None:
        """Python traces this thread no more, if it was pydevd that had it traced."""
        trace = sys.gettrace()
        if trace is not None and type(trace).__module__.startswith("_pydevd"):
            sys.settrace(None)

    # -- its threads -----------------------------------------------------------------------

    def trace(self) -> None:
        """Stop this thread where the editor wants it to: a thread of ours may have seen to none."""
        self._parts["debugpy"].debug_this_thread()

    def suspend(self, frame: FrameType) -> None:
        """Stop this thread at `frame`, which it is in, until the editor resumes it."""
        self.trace()
        thread, constants = threading.current_thread(), "_pydevd_bundle.pydevd_comm_constants"
        info, monitoring = self._info(thread), self._parts.get(_MONITORING)
        # What pydevd runs here, and what the editor evaluates, is not stopped.
        info.is_tracing += 1
        if monitoring is not None:
            monitoring.start_monitoring()  # first: else it may not know this thread
            monitoring.stop_monitoring()
        try:
            self._db.set_suspend(thread, self._parts[constants].CMD_SET_BREAK)
            self._plain(self._db, thread, frame, "line", None)
        finally:
            info.is_tracing -= 1
            if monitoring is not None:
                monitoring.start_monitoring()

    def _info(self, thread: threading.Thread) -> Any:
        part = self._parts["_pydevd_bundle.pydevd_additional_thread_info"]
        return part.set_additional_thread_info(thread)

    def is_suspended(self, thread: threading.Thread) -> bool:
        """Whether `resume` reaches it: before that, what resumes it is lost."""
        suspended = self._parts["_pydevd_bundle.pydevd_constants"].STATE_SUSPEND
        return bool(self._info(thread).pydev_state == suspended)

    def resume(self, thread: threading.Thread, how: How = How.END) -> None:
        """A thread that waits in `suspend` continues; with `how`, to where pydevd stops it next."""
        info, constants = self._info(thread), self._parts["_pydevd_bundle.pydevd_comm_constants"]
        step = getattr(constants, _STEPS[how]) if how in _STEPS else -1
        info.pydev_original_step_cmd = info.pydev_step_cmd = step
        info.pydev_step_stop = None
        info.pydev_state = self._parts["_pydevd_bundle.pydevd_constants"].STATE_RUN
        info.update_stepping_info()

    def resume_all(self) -> None:
        """Resume all threads that pydevd has stopped."""
        self._parts["_pydevd_bundle.pydevd_thread_lifecycle"].resume_threads("*")


def _leave_alone_what_is_ours() -> None:
    """Threads of ours are never stopped: they report who is paused, and resume it."""
    for thread in threading.enumerate():
        if thread.name.startswith("ddp-"):
            for mark in ("pydev_do_not_trace", "is_pydev_daemon_thread"):
                setattr(thread, mark, True)
