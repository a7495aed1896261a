"""The session's client of the fork server: starts it, spawns and signals, is notified of exits."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from json import dumps, loads  # also where a cell sets json.loads to something else
from pathlib import Path
from typing import Any

from ddp_notebook.errors import SessionLost
from ddp_notebook.launch import shared_fork_server
from ddp_notebook.launch.environment import child_environment
from ddp_notebook.launch.shared_fork_server import ForkedServer
from ddp_notebook.launch.timeouts import scaled_for_load

if sys.platform != "win32":
    import fcntl

ExitHandler = Callable[[int], None]

_FORKED_WITHIN_S = 10.0
"""On an idle machine; the server that is asked may have just started to load torch."""
_LOST = "The process that starts ranks (fork server) has ended. Start again: %ddp_init"
_BOOT = (
    # A json.py in the working directory, which Python puts first, would shadow Python's.
    "import sys; sys.path[:] = filter(None, sys.path); import json;"
    "a = json.loads(sys.argv.pop()); sys.path[:] = a['python_path'];"
    "from ddp_notebook.launch.fork_server import main; main(**a)"
)


def can_fork() -> bool:
    """True where ranks can be forked: not on Windows, nor on macOS, whose frameworks forbid it."""
    return hasattr(os, "fork") and sys.platform != "darwin"


def _address(mode: str) -> str:
    """The address of fork servers equal to one started now; empty if none is shared."""
    return shared_fork_server.address(sys.path) if mode == "fork" else ""


def _to_pass(descriptor: int, passed: contextlib.ExitStack) -> int:
    """A copy of it that a child may inherit; closed with `passed`.

    Where this process has no stdin, a new descriptor may be 0: a child's stdin would replace it.
    """
    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    passed.callback(os.close, copy)
    return copy


class ForkServerClient:
    """One fork server, started on construction and warm when `ready` is done.

    `mode` is fork, or process where ranks are ordinary processes. `ready` is a Future of the
    server's own report. If another notebook has an equal server, that server forks ours.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self._python_path = list(sys.path)
        self._address = _address(mode)
        self.ready: Future[Mapping[str, Any]] = Future()
        self._loaded = 0.0
        self._on_loading: Callable[[float], None] = lambda done: None
        self._tags = itertools.count()
        self._spawned: dict[int, Future[int]] = {}
        self._exit_handlers: dict[int, ExitHandler] = {}
        self._exit_codes: dict[int, int] = {}
        self.peak_bytes: dict[int, int] = {}
        """The peak memory of children that ended, by pid."""
        self._pidfds: dict[int, int] = {}
        self._lost_handlers: list[Callable[[], None]] = []
        self._reset: Future[None] = Future()
        self._lost = False
        self._closing = False
        self._lock = threading.Lock()
        self._unsent: list[bytes] | None = None
        """Commands to send once the forked server reports; None as soon as they can be sent."""
        self._listens_at: tuple[int, int] | None = None
        """The socket of our own server, which it cannot remove when it is killed."""
        self._process = self._begin()
        threading.Thread(target=self._read, name="ddp-forkserver", daemon=True).start()

    def _begin(self) -> subprocess.Popen[bytes] | ForkedServer:
        listener = shared_fork_server.listen(self._address)
        if self._address and listener is None:  # another server listens there and forks ours
            server = shared_fork_server.request(self._address)
            if server is not None:
                self._unsent = []
                return server
        if listener is not None:
            self._listens_at = shared_fork_server.file_of(self._address)
        try:
            return self._start(self._address, listener)
        finally:
            if listener is not None:
                listener.close()

    def _start(
        self, address: str = "", listener: socket.socket | None = None
    ) -> subprocess.Popen[bytes]:
        """A server of our own, which other notebooks reach at `address`."""
        # Not its stdout: what Python loads first, as a sitecustomize, may print.
        events_read, events_write = os.pipe()
        with contextlib.ExitStack() as passed:
            events = _to_pass(events_write, passed)
            os.close(events_write)
            listens = -1 if listener is None else _to_pass(listener.fileno(), passed)
            arguments = {
                "mode": self.mode,
                "python_path": sys.path,  # so that ranks import what the notebook can import
                "address": address,
                "listener": listens,
                "events": events,
            }
            try:
                process = subprocess.Popen(
                    [sys.executable, "-c", _BOOT, dumps(arguments)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=[fd for fd in (events, listens) if fd >= 0],
                )
            except BaseException:
                os.close(events_read)
                raise
        process.stdout = os.fdopen(events_read, "rb")
        return process

    @property
    def pid(self) -> int:
        """The fork server's process; 0 until another server has forked it."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """False once the fork server is gone."""
        return not self._lost

    def equals_a_new_one(self) -> bool:
        """False when what it has loaded is not what a server started now would load.

        Something was installed or edited, or the module path or the environment was changed.
        """
        return self._python_path == sys.path and self._address == _address(self.mode)

    def spawn(self, spec: Mapping[str, Any], on_exit: ExitHandler, timeout_s: float = 60) -> int:
        """Start a child; its pid. `on_exit(code)` runs once, on the reader's thread, when it ends.

        Raises SessionLost when the fork server is gone, OSError when the child cannot start.
        """
        tag = next(self._tags)
        future = self._spawned[tag] = Future()
        self._send({"cmd": "spawn", "tag": tag, "spec": dict(spec)})
        try:
            pid = future.result(timeout_s)
        except TimeoutError:
            raise OSError(
                f"the fork server has not answered for {timeout_s:g} s: is the machine very busy?"
            ) from None
        with self._lock:
            code = self._exit_codes.pop(pid, None)
            if code is None:
                self._exit_handlers[pid] = on_exit
                self._open_pidfd(pid)
        if code is not None:  # it ended before the handler was registered
            on_exit(code)
        return pid

    def spawn_call(
        self, entry: str, arguments: Mapping[str, Any], log: Path, on_exit: ExitHandler
    ) -> int:
        """Start a child that calls the function `entry`, ``module:function``, and ends; its pid.

        It is in this process's folder and environment, and writes to `log`. Raises as `spawn`.
        """
        spec = {
            "calls": [[entry, arguments]],
            "env": child_environment({}),
            "cwd": os.getcwd(),  # noqa: PTH109
            "log": str(log),
        }
        return self.spawn(spec, on_exit)

    def signal(self, pid: int, number: int) -> None:
        """Signal a child that this fork server started.

        Signals it directly through a pidfd (Linux), because the fork server may be busy importing.
        A pid is not safe: it may have been reused.
        """
        with self._lock:
            pidfd = self._pidfds.get(pid)
            if pidfd is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, number)
                return
        self._send({"cmd": "signal", "pid": pid, "signal": int(number)})

    def own(self, folder: Path) -> None:
        """Have the fork server remove this folder when this process is gone."""
        self._send({"cmd": "own", "path": str(folder), "inode": folder.stat().st_ino})

    def on_loading(self, handler: Callable[[float], None]) -> None:
        """Call `handler` with the share of torch that is loaded: now, on each change, finally 1."""
        self._on_loading = handler
        handler(1.0 if self.ready.done() else self._loaded)

    def on_lost(self, handler: Callable[[], None]) -> None:
        """Call `handler` when the fork server is gone (at once if it is)."""
        with self._lock:
            if not self._lost:
                self._lost_handlers.append(handler)
                return
        handler()

    def reset(self, timeout_s: float = 5) -> bool:
        """End all children; the server stays, for other ranks. False when it does not answer."""
        self._reset = Future()
        with self._lock:
            self._lost_handlers.clear()
            self._exit_handlers.clear()
        try:
            self._send({"cmd": "reset"})
            self._reset.result(scaled_for_load(timeout_s))
        except (SessionLost, TimeoutError):
            return False
        return True

    def wake(self) -> None:
        """Resume the fork server (SIGCONT) if something stopped it."""
        if sys.platform != "win32":
            self._process.send_signal(signal.SIGCONT)

    def close(self, timeout_s: float = 5) -> None:
        """End the fork server with all its children; returns when they are gone."""
        with self._lock:
            self._closing = True
            self._lost_handlers.clear()
        self.wake()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _open_pidfd(self, pid: int) -> None:
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # it has just ended, or this kernel has none
                self._pidfds[pid] = os.pidfd_open(pid)

    def _close_pidfd(self, pid: int) -> None:
        pidfd = self._pidfds.pop(pid, None)
        if pidfd is not None:
            os.close(pidfd)

    def _send(self, command: Mapping[str, Any]) -> None:
        data = dumps(command).encode() + b"\n"
        try:
            with self._lock:
                if self._unsent is not None and not self._closing:
                    self._unsent.append(data)
                else:
                    self._write(data)
        except (OSError, ValueError) as error:
            raise SessionLost(_LOST) from error

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def _read(self) -> None:
        if isinstance(self._process, ForkedServer):
            with contextlib.suppress(OSError, ValueError):  # it is being closed
                if self._process.answers(scaled_for_load(_FORKED_WITHIN_S)):
                    self._listen()
            if not self.ready.done():
                self._start_own_server()
        self._listen()
        self._process.wait()
        self._gone()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self._process.stdout:
                self._handle(loads(line))

    def _start_own_server(self) -> None:
        """The other server has ended or does not answer: start our own."""
        with self._lock:
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
            if not self._closing:
                with contextlib.suppress(OSError):  # the reader then detects the loss
                    self._process = self._start()
                    self._send_unsent()

    def _send_unsent(self) -> None:
        """Send the queued commands; from now on commands are sent at once. The lock is held."""
        unsent, self._unsent = self._unsent or [], None
        with contextlib.suppress(OSError, ValueError):  # lost or closed: the reader notices
            self._write(b"".join(unsent))

    def _handle(self, event: Mapping[str, Any]) -> None:
        match event["event"]:
            case "ready":
                if isinstance(self._process, ForkedServer):
                    if not self._process.identify():
                        raise ValueError("it is not known which process that is")
                    with self._lock:
                        self._send_unsent()
                self.ready.set_result(event)
                self._on_loading(1.0)
            case "loading":
                self._loaded = event["done"]
                self._on_loading(self._loaded)
            case "spawned":
                self._spawned.pop(event["tag"]).set_result(event["pid"])
            case "error":
                self._spawned.pop(event["tag"]).set_exception(OSError(event["text"]))
            case "exited":
                with self._lock:
                    self._close_pidfd(event["pid"])
                    self.peak_bytes[event["pid"]] = event["peak_bytes"]
                    handler = self._exit_handlers.pop(event["pid"], None)
                    if handler is None:
                        self._exit_codes[event["pid"]] = event["code"]
                if handler is not None:
                    handler(event["code"])
            case "reset":
                self._exit_codes.clear()
                self._reset.set_result(None)

    def _gone(self) -> None:
        shared_fork_server.remove(self._address, self._listens_at)
        with self._lock:
            self._lost = True
            handlers, self._lost_handlers = self._lost_handlers, []
            waiting = [*self._spawned.values()]
            for pid in list(self._pidfds):
                self._close_pidfd(pid)
        lost = SessionLost(_LOST)
        futures: list[Future[Any]] = [self.ready, self._reset, *waiting]
        for future in futures:
            if not future.done():
                future.set_exception(lost)
        self._on_loading(1.0)
        for handler in handlers:
            handler()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
