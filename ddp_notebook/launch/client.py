"""The session's end of the fork server: start it, have it spawn and signal, hear of exits."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from ddp_notebook.errors import SessionLost
from ddp_notebook.launch.siblings import Sibling, ask, listen, meeting_point
from ddp_notebook.launch.timeouts import scaled_for_load

ENGINE_MODULES = (
    "ipyparallel.engine.app",
    "ipyparallel.engine.kernel",
    "ipyparallel.controller.app",
    "ipykernel.kernelapp",
    "ipykernel.control",
    "ipykernel.debugger",  # half of the time an engine takes to start
    "ipykernel.comm.manager",
    "IPython.core.completer",
    "IPython.core.completerlib",
    "IPython.core.oinspect",
    "IPython.extensions.storemagic",
    "IPython.core.magics",
    "zmq.asyncio",
    "psutil",
)
TORCH_MODULES = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch.utils.data.distributed",
    "ddp_notebook.rank.setup.stages",
    "ddp_notebook.rank.cells.runner",
    "ddp_notebook.rank.setup.store_process",
    "ddp_notebook.rank.bench.collectives_task",
    "ddp_notebook.rank.bench.floors",
    "ddp_notebook.rank.bench.loop",
    # The first DDP(...) or optimizer.step() imports these: 2 s in each rank, 1 s once here.
    "torch._dynamo",
)
LATER_MODULES = ("matplotlib.font_manager", "matplotlib.figure", "matplotlib.pyplot")
"""Imported when nothing else is to do, in steps: a command waits for the end of a step.

The backend itself must be loaded where the shell is.
"""

ExitHandler = Callable[[int], None]

_SIBLING_WITHIN_S = 10.0
"""On a quiet machine; the server that is asked may have begun to load torch just now."""
_BOOT = (
    "import json, sys; a = json.loads(sys.argv.pop()); sys.path[:] = a['python_path'];"
    "from ddp_notebook.launch.forkserver import main; main(**a)"
)


def can_fork() -> bool:
    """True where ranks can be forked: not on Windows, nor on macOS, whose frameworks forbid it."""
    return hasattr(os, "fork") and sys.platform != "darwin"


class ForkServerClient:
    """One fork server, started on construction and warm when `ready` is done.

    `mode` is fork, or process where ranks are ordinary processes. `ready` is a Future of
    the server's own report. `on_lost` callbacks run when the fork server is gone.

    Where another notebook has a server that is like what ours would be, that one forks ours.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.ready: Future[Mapping[str, Any]] = Future()
        self._tags = itertools.count()
        self._spawned: dict[int, Future[int]] = {}
        self._exit_handlers: dict[int, ExitHandler] = {}
        self._exit_codes: dict[int, int] = {}
        self._pidfds: dict[int, int] = {}
        self._lost_handlers: list[Callable[[], None]] = []
        self._lost = False
        self._closing = False
        self._lock = threading.Lock()
        self._unsent: list[bytes] | None = None
        """What is to be sent as soon as a sibling is there; None when things can be sent."""
        self._process = self._begin()
        threading.Thread(target=self._read, name="ddp-forkserver", daemon=True).start()

    def _begin(self) -> subprocess.Popen[bytes] | Sibling:
        point = meeting_point(_python_path()) if self.mode == "fork" else ""
        door = listen(point)
        if point and door is None and (sibling := ask(point)) is not None:
            self._unsent = []
            return sibling
        try:
            return self._start(point, door)
        finally:
            if door is not None:
                door.close()

    def _start(self, point: str = "", door: socket.socket | None = None) -> subprocess.Popen[bytes]:
        """A server of our own; at `door` others ask it for theirs."""
        fork = self.mode == "fork"
        arguments = {
            "mode": self.mode,
            "preload": [*ENGINE_MODULES, *TORCH_MODULES] if fork else [],
            "later": list(LATER_MODULES) if fork else [],
            "python_path": _python_path(),
            "point": point,
            "door": -1 if door is None else door.fileno(),
        }
        return subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=() if door is None else (door.fileno(),),
        )

    @property
    def pid(self) -> int:
        """The fork server's process; 0 as long as another one has yet to fork it."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """False once the fork server is gone."""
        return not self._lost

    def spawn(self, spec: Mapping[str, Any], on_exit: ExitHandler, timeout_s: float = 60) -> int:
        """Start a child; its pid. `on_exit(code)` runs once, on the reader's thread, when it ends.

        Raises SessionLost when the fork server is gone, OSError when the child cannot start.
        """
        tag = next(self._tags)
        future = self._spawned[tag] = Future()
        self._send({"cmd": "spawn", "tag": tag, "spec": dict(spec)})
        pid = future.result(timeout_s)
        with self._lock:
            code = self._exit_codes.pop(pid, None)
            if code is None:
                self._exit_handlers[pid] = on_exit
                self._hold(pid)
        if code is not None:  # it ended before we could ask to be told
            on_exit(code)
        return pid

    def signal(self, pid: int, number: int) -> None:
        """Signal a child that this fork server started.

        Directly where the system has file descriptors of processes (Linux), for the fork server
        may be importing; a pid alone may be another process's by now.
        """
        with self._lock:
            held = self._pidfds.get(pid)
            if held is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(held, number)
                return
        self._send({"cmd": "signal", "pid": pid, "signal": int(number)})

    def own(self, path: str) -> None:
        """Have `path` removed when this process is gone."""
        self._send({"cmd": "own", "path": path})

    def on_lost(self, handler: Callable[[], None]) -> None:
        """Call `handler` when the fork server is gone (at once if it is)."""
        with self._lock:
            if not self._lost:
                self._lost_handlers.append(handler)
                return
        handler()

    def close(self, timeout_s: float = 5) -> None:
        """End the fork server with all its children; returns when they are gone."""
        with self._lock:
            self._closing = True
            self._lost_handlers.clear()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _hold(self, pid: int) -> None:
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # it has just ended, or this kernel has none
                self._pidfds[pid] = os.pidfd_open(pid)

    def _let_go(self, pid: int) -> None:
        held = self._pidfds.pop(pid, None)
        if held is not None:
            os.close(held)

    def _send(self, command: Mapping[str, Any]) -> None:
        data = json.dumps(command).encode() + b"\n"
        try:
            with self._lock:
                if self._unsent is not None and not self._closing:
                    self._unsent.append(data)
                else:
                    self._write(data)
        except (OSError, ValueError) as error:
            raise SessionLost(
                "The fork server that starts ranks is gone. Start again: %ddp_init"
            ) from error

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def _read(self) -> None:
        if isinstance(self._process, Sibling):
            with contextlib.suppress(OSError, ValueError):  # it is being closed
                if self._process.answers(scaled_for_load(_SIBLING_WITHIN_S)):
                    self._listen()
            if not self.ready.done():
                self._do_without_sibling()
        self._listen()
        self._process.wait()
        self._gone()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self._process.stdout:
                self._handle(json.loads(line))

    def _do_without_sibling(self) -> None:
        """Who was asked has ended, or does not get to it: start a server of our own."""
        with self._lock:
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
            if not self._closing:
                with contextlib.suppress(OSError):  # then it is lost
                    self._process = self._start()
                    self._send_rest()

    def _send_rest(self) -> None:
        """From here on things can be sent; the lock is held."""
        unsent, self._unsent = self._unsent or [], None
        with contextlib.suppress(OSError, ValueError):  # it is lost, or closed: the reader notices
            self._write(b"".join(unsent))

    def _handle(self, event: Mapping[str, Any]) -> None:
        match event["event"]:
            case "ready":
                if isinstance(self._process, Sibling):
                    with self._lock:
                        self._process.is_process(event["pid"])
                        self._send_rest()
                self.ready.set_result(event)
            case "spawned":
                self._spawned.pop(event["tag"]).set_result(event["pid"])
            case "error":
                self._spawned.pop(event["tag"]).set_exception(OSError(event["text"]))
            case "exited":
                with self._lock:
                    self._let_go(event["pid"])
                    handler = self._exit_handlers.pop(event["pid"], None)
                    if handler is None:
                        self._exit_codes[event["pid"]] = event["code"]
                if handler is not None:
                    handler(event["code"])

    def _gone(self) -> None:
        with self._lock:
            self._lost = True
            handlers, self._lost_handlers = self._lost_handlers, []
            waiting = [*self._spawned.values()]
            for pid in list(self._pidfds):
                self._let_go(pid)
        lost = SessionLost("The fork server that starts ranks is gone. Start again: %ddp_init")
        futures: list[Future[Any]] = [self.ready, *waiting]
        for future in futures:
            if not future.done():
                future.set_exception(lost)
        for handler in handlers:
            handler()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _python_path() -> Sequence[str]:
    """This process's module path, so that ranks import what the notebook can import."""
    return list(sys.path)
