"""An editor at this rank: it is let in, has the threads that stand, and gives them back."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import FrameType

from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import How, Move
from ddp_notebook.rank.collectives.pause import PauseGate
from ddp_notebook.rank.component import Component, Run
from ddp_notebook.rank.debugger.debugger import Debugger
from ddp_notebook.rank.debugger.stops import Stop
from ddp_notebook.rank.editor import debugpy_private
from ddp_notebook.rank.editor.debugpy_private import Debugpy, Suspend
from ddp_notebook.rank.editor.port import LOOPBACK, Port, is_mine, pass_on
from ddp_notebook.rank.main_thread import Aborted, MainThread

_OPEN_S = 600.0
"""So long the port waits for an editor."""
_CONNECTS_WITHIN_S = 30.0
_DONE_WITHIN_S = _SUSPENDED_WITHIN_S = 1.5
_LOOK_EVERY_S = 0.005
_ANSWERED_WITHIN_S = 1.0
"""So long an editor that has said that it leaves is still answered."""
_IN_EDITOR = "in the editor"
_LEFT = "the editor has left it here"
_NEEDS_DEBUGPY = "it needs debugpy 1.8.2 or later in the Python of the ranks"
_PENDING_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class Editor(Component):
    """Lets one editor in at a time. `debugger` has the stops, also those that an editor makes."""

    def __init__(self, debugger: Debugger, gate: PauseGate, main_thread: MainThread) -> None:
        self._debugger = debugger
        self._gate = gate
        self._main_thread = main_thread
        self._debugpy = Debugpy(self._suspended, self._leaves)
        self._lock = threading.Lock()
        self._port: Port | None = None
        """The last one: open, or that of the editor that is here, or of no use any more."""
        self._server: threading.Thread | None = None
        self._is_here = False
        """An editor is attached, and not about to leave."""
        self._until_s = 0.0
        """Until when one that leaves is answered."""
        self._is_traced = False
        """debugpy is at work in this process."""
        self._held: dict[Stop, Suspend | None] = {}
        """Threads that stand and are the editor's, or were until it left. The value is what waits
        in pydevd, where it was pydevd that stopped it."""
        self._pid = os.getpid()
        self._untrace = _PENDING_CALL(self._untraced)

    # -- moments of the rank ---------------------------------------------------------------

    def attach(self) -> None:
        """A forked child is no rank: no editor has it."""
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._debugpy.leave_child_alone)

    def run_begins(self, run: Run) -> None:
        """Breakpoints of the editor stop what runs."""
        if self._is_here:
            self._debugpy.trace()
        else:
            self._debugpy.untrace()

    def run_ends(self) -> None:
        """What was left standing is over."""
        if not self._is_here:
            self._end()
            self._debugpy.untrace()

    # -- in and out ------------------------------------------------------------------------

    def answer(self, wanted: calls.EditorWanted) -> calls.EditorPort:
        """Open a port, or say which one is; or close it and have the editor leave. Any thread."""
        with self._lock:
            return self._open() if wanted.open else self._close()

    def _open(self) -> calls.EditorPort:
        if not debugpy_private.is_installed():
            problem = f"{_NEEDS_DEBUGPY}, and it is not there"
            return calls.EditorPort(problem=problem, lacks_debugpy=True)
        if lacks := self._debugpy.load():
            problem = f"{_NEEDS_DEBUGPY}: this one lacks {lacks}"
            return calls.EditorPort(problem=problem, lacks_debugpy=True)
        if self._port is None or (self._port.closed.is_set() and not self._is_here):
            if self._server is not None:
                self._server.join(_DONE_WITHIN_S)
                if self._server.is_alive():
                    return calls.EditorPort(problem=calls.LEFT_IN_DEBUGPY)
            try:
                self._port = Port()
            except OSError as error:
                return calls.EditorPort(problem=f"no port can be opened: {error.strerror}")
            serve = partial(self._serve, self._port)
            self._server = threading.Thread(target=serve, name="ddp-editor", daemon=True)
            self._server.start()
        return self._state()

    def _state(self) -> calls.EditorPort:
        port = self._port
        if port is None or (port.closed.is_set() and not self._is_here):
            return calls.EditorPort()
        return calls.EditorPort(
            port.number, self._is_here, str(Path.cwd()), checked=sys.platform == "linux"
        )

    def _close(self) -> calls.EditorPort:
        state, port = self._state(), self._port
        if port is not None and not self._is_here:
            port.close()
        if self._is_here:
            self._leaves()
            self._debugpy.resume_all()
        return state

    def _serve(self, port: Port) -> None:
        """The life of a port, on a thread of its own."""
        editor = port.accept(_OPEN_S)
        if editor is not None:
            self._attached(editor)

    def _attached(self, editor: socket.socket) -> None:
        """Have debugpy speak with this editor until it leaves."""
        self._is_here = self._is_traced = True
        with socket.create_server((LOOPBACK, 0), backlog=1) as listener:
            listener.settimeout(_CONNECTS_WITHIN_S)
            number: int = listener.getsockname()[1]
            connect = partial(self._connect, number)
            threading.Thread(target=connect, name="ddp-debugpy", daemon=True).start()
            with contextlib.suppress(OSError):
                inner, _ = listener.accept()
                os.register_at_fork(after_in_child=inner.close)
                if is_mine(inner):
                    pass_on(editor, inner, self._look, self._gone)
        editor.close()
        self._gone()
        self._end()
        self._untrace_main_thread()

    def _connect(self, number: int) -> None:
        """Returns when the editor has set its breakpoints, or has left."""
        self._debugpy.connect(LOOPBACK, number)
        if not self._is_here:
            self._clean()
            return
        self._debugger.take = self._take
        if (stop := self._debugger.stopped) is not None:
            stop.do(partial(self._take, stop))

    def _look(self) -> bool:
        """Free what was aborted; whether there is still something to pass on."""
        if self._main_thread.abort.is_set():
            for stop in tuple(self._held):
                self._debugpy.resume(stop.thread)
        if self._is_here or any(self._held.values()):
            return True
        return time.monotonic() < self._until_s

    def _leaves(self) -> None:
        """The editor leaves: what it held stays where it is, in the notebook's hands."""
        self._until_s = time.monotonic() + _ANSWERED_WITHIN_S
        self._is_here, self._debugger.take = False, None

    def _gone(self) -> None:
        """It has left without a word, or is about to be done with."""
        if self._is_here:
            self._leaves()
            self._debugpy.resume_all()
        self._until_s = 0.0

    def _end(self) -> None:
        """No debugger but ours is in this process any more."""
        with self._lock:
            traced, self._is_traced = self._is_traced, False
        if traced:
            self._held.clear()
            self._clean()

    def _clean(self) -> None:
        self._debugpy.leave()
        self._debugpy.untrace()
        self._untrace_main_thread()

    def _untraced(self, _: object) -> int:
        """Called by Python in the main thread."""
        self._debugpy.untrace()
        return 0

    def _untrace_main_thread(self) -> None:
        """It continues as without a debugger, as soon as Python is between two instructions."""
        ctypes.pythonapi.Py_AddPendingCall(self._untrace, None)

    # -- paused threads ------------------------------------------------------------------

    def _take(self, stop: Stop) -> None:
        """In a thread that we have stopped: it is the editor's until that resumes it or leaves."""
        if self._is_here and not stop.over:
            self._hold(stop, lambda: self._debugpy.suspend(stop.frame), None)

    def _suspended(self, frame: FrameType, suspend: Suspend) -> None:
        """In a thread that pydevd stops, at a line of the editor's or after a step of its."""
        why = _IN_EDITOR if self._is_here else _LEFT
        take = partial(self._hold, suspend=suspend, own=suspend)
        try:
            known = self._debugger.stopped_by_other(frame, why, take)
        except Aborted as error:  # pydevd would take an error for one of its own
            raise KeyboardInterrupt from error
        if not known and self._is_here:
            suspend()

    def _hold(self, stop: Stop, suspend: Suspend, own: Suspend | None) -> None:
        if not stop.hold(partial(self._move, stop)):
            return
        self._held[stop] = own
        if self._is_here:
            self._debugger.report(stop, _IN_EDITOR)
            self._wait_in(stop, suspend)
        if stop.ordered:
            return
        if self._is_here:
            self._resume(stop, Move(How.EDITOR))
            return
        if own is None:
            self._give_back(stop)
        self._debugger.report(stop, _LEFT)

    def _wait_in(self, stop: Stop, suspend: Suspend) -> None:
        try:
            suspend()
        except BaseException:
            self._held.pop(stop, None)
            self._debugpy.resume(stop.thread)
            raise
        self._debugger.check()

    def _give_back(self, stop: Stop) -> None:
        """The notebook moves it on from here, without debugpy."""
        stop.holder = None
        self._held.pop(stop, None)
        self._debugpy.untrace()

    def _resume(self, stop: Stop, order: Move) -> None:
        self._held.pop(stop, None)
        stop.resume(order)

    def _move(self, stop: Stop, order: Move) -> calls.Moved:
        """Resume a thread that is paused in pydevd. Any thread."""
        if order.how is How.LINE:
            return calls.Moved(
                0, "an editor has it: set a breakpoint at that line, then %ddp_step --to end"
            )
        here = self._is_here
        if here and not self._stands(stop):
            return calls.Moved(0, "it is on its way to the editor: try again")
        if order.how in (How.COLLECTIVE, How.END):
            self._gate.paused = order.how is How.COLLECTIVE
        if here:
            self._debugpy.resume(stop.thread, order.how)
        else:
            stop.do(partial(self._leave_pydevd, stop, order))
        return calls.Moved(stop.number)

    def _stands(self, stop: Stop) -> bool:
        """Wait until its thread, which is reported to be in the editor, waits in pydevd."""
        until_s = time.monotonic() + _SUSPENDED_WITHIN_S
        while not (stands := self._debugpy.is_suspended(stop.thread)):
            if not self._is_here or stop.ordered or time.monotonic() > until_s:
                break
            time.sleep(_LOOK_EVERY_S)
        return stands

    def _leave_pydevd(self, stop: Stop, order: Move) -> None:
        """The editor has left a thread in pydevd, which alone can step on from there."""
        suspend = self._held.get(stop)
        if suspend is not None:
            self._debugpy.resume(stop.thread, order.how)
            suspend()
        self._resume(stop, Move(How.EDITOR))
        if order.how in (How.COLLECTIVE, How.END):
            self._end()
