"""The session's client of the fork server: starts it, spawns and signals, is notified of exits."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import psutil

from ddp_notebook.errors import SessionLost
from ddp_notebook.launch import host_facts
from ddp_notebook.launch.timeouts import scaled_for_load

T = TypeVar("T")
ExitHandler = Callable[[int], None]

_PACKAGE = Path(__file__).parents[1]
_LOST = "The process that starts ranks (fork server) has ended. Start again: %ddp_init"
_BOOT = (
    # A json.py in the working directory, which Python puts first, would shadow Python's.
    "import sys; sys.path[:] = filter(None, sys.path); import json;"
    "a = json.loads(sys.argv.pop()); sys.path[:] = a['python_path'];"
    "from ddp_notebook.launch.fork_server import main; main(**a)"
)
_ANSWERS_WITHIN_S = 60.0
_OF_THE_SHELL = ("_", "COLUMNS", "LINES", "OLDPWD", "PWD", "PYTEST_CURRENT_TEST", "SHLVL")
"""Variables of shells, terminals and pytest, which no fork server depends on."""
_INHERITED = ("Umask", "Cpus_allowed", "Mems_allowed")
"""Attributes that the fork server's children inherit, by its names in proc_pid_status(5)."""


def can_fork() -> bool:
    """True where ranks can be forked: not on macOS, whose frameworks forbid it."""
    return sys.platform != "darwin"


def _what_a_server_starts_from() -> list[Any]:
    """Return what a fork server that this process starts now would load and pass on.

    The module path, the environment, when this package and each site-packages folder were changed
    last, and the limits of this process.
    """
    # Variables that begin with JPY_ are the notebook kernel's own; children do not get them.
    left_out = ("JPY_", *(f"{name}=" for name in _OF_THE_SHELL))
    variables = sorted(f"{name}={value}" for name, value in os.environ.items())
    folders = [Path(path) for path in sys.path if path.endswith("-packages")]
    changed = [max(path.stat().st_mtime_ns for path in _PACKAGE.rglob("*.py"))]
    changed += [folder.stat().st_mtime_ns for folder in folders if folder.is_dir()]
    limits: list[str] = []
    with contextlib.suppress(OSError):  # not Linux
        limits = Path("/proc/self/limits").read_text("utf-8").splitlines()
        status = Path("/proc/self/status").read_text("utf-8", "replace").splitlines()
        limits += [line for line in status if line.startswith(_INHERITED)]
    return [*sys.path, *(v for v in variables if not v.startswith(left_out)), *changed, *limits]


def result_while_busy(future: Future[T], cpu_s: Callable[[], float], silent_s: float) -> T:
    """Wait for a result. Raises TimeoutError once `cpu_s()` has not changed for `silent_s`."""
    seen_s, since_s = -1.0, time.monotonic()
    while True:
        try:
            return future.result(min(1.0, silent_s))
        except TimeoutError:
            if (used_s := cpu_s()) != seen_s:
                seen_s, since_s = used_s, time.monotonic()
            elif time.monotonic() - since_s > silent_s:
                raise


class ForkServerClient:
    """One fork server, started on construction and warm when `ready` is done.

    `mode` is fork, or process where ranks are ordinary processes. `ready` is a Future of the
    server's own report.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self._started_from = _what_a_server_starts_from()
        self.ready: Future[Mapping[str, Any]] = Future()
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
        self._lock = threading.Lock()
        # Not its stdout: what Python loads first, as a sitecustomize, may print.
        events_read, events_write = os.pipe()
        # Where this process has no stdin, a new descriptor may be 0: the child's would replace it.
        events = fcntl.fcntl(events_write, fcntl.F_DUPFD_CLOEXEC, 3)
        os.close(events_write)
        # `sys.path` is passed so that ranks import what the notebook can import.
        arguments = {"mode": mode, "python_path": sys.path, "events": events}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[events],
            )
        except BaseException:
            os.close(events_read)
            raise
        finally:
            os.close(events)
        self._events = os.fdopen(events_read, "rb")
        threading.Thread(target=self._read, name="ddp-forkserver", daemon=True).start()

    @property
    def pid(self) -> int:
        """The fork server's process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """False once the fork server is gone."""
        return not self._lost

    def equals_a_new_one(self) -> bool:
        """Return False when what it has loaded is not what a server started now would load.

        Something was installed or edited, or the module path, the environment or a limit was
        changed.
        """
        return self._started_from == _what_a_server_starts_from()

    def spawn(
        self,
        spec: Mapping[str, Any],
        on_exit: ExitHandler,
        begun: Callable[[int], None] = lambda pid: None,
    ) -> int:
        """Start a child; return its pid.

        `on_exit(code)` runs once, on the reader's thread, when it ends; not before `begun(pid)` has
        returned: who is told of an end knows the process. Raises SessionLost when the fork server
        is gone, OSError when the child cannot start.
        """
        tag = next(self._tags)
        future: Future[int] = Future()
        # Under the lock either this sees that the server is gone, or `_gone` sees the future. That
        # the command could be written proves nothing: a dying child may hold the pipe's other end.
        with self._lock:
            if self._lost:
                raise SessionLost(_LOST)
            self._spawned[tag] = future
        self._send({"cmd": "spawn", "tag": tag, "spec": dict(spec)})
        try:
            pid = self.result_of(future, _ANSWERS_WITHIN_S)
        except TimeoutError:
            raise OSError(
                f"the fork server has not answered for {_ANSWERS_WITHIN_S:g} s: is the machine "
                "very busy?"
            ) from None
        begun(pid)
        # The reader's thread may have been told of its exit before this thread was told its pid.
        # Under the lock either it finds the handler, or this thread finds the code.
        with self._lock:
            code = self._exit_codes.pop(pid, None)
            if code is None:
                self._exit_handlers[pid] = on_exit
                if hasattr(os, "pidfd_open"):
                    with contextlib.suppress(OSError):  # it has just ended, or this kernel has none
                        self._pidfds[pid] = os.pidfd_open(pid)
        if code is not None:
            on_exit(code)
        return pid

    def result_of(self, future: Future[T], silent_s: float) -> T:
        """Wait for what the server answers. Raises TimeoutError, but not while it makes progress.

        From a cold disk torch may load for minutes, and the server answers between two imports: so
        the limit counts from when it last used the CPU, in seconds.
        """
        return result_while_busy(future, self.cpu_s, silent_s)

    def cpu_s(self) -> float:
        """Return the CPU time that the server has used, by which one sees that it loads torch."""
        with contextlib.suppress(psutil.Error):
            return float(sum(psutil.Process(self.pid).cpu_times()[:2]))
        return 0.0

    def signal(self, pid: int, number: int) -> None:
        """Signal a child that this fork server started.

        Signals it directly through a pidfd (Linux), because the fork server may be busy importing.
        A pid is not safe: it may have been reused.
        """
        with self._lock:
            # The signal is sent under the lock, too: the reader's thread closes the descriptor of a
            # child that was reaped, and its number may then be any other file's.
            pidfd = self._pidfds.get(pid)
            if pidfd is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, number)
                return
        self._send({"cmd": "signal", "pid": pid, "signal": int(number)})

    def question(self, host: int, name: str, **arguments: Any) -> Any:
        """Ask a host, which can only be this machine, one of `host_facts.QUESTIONS`."""
        assert host == 0
        return host_facts.QUESTIONS[name](**arguments)

    def own(self, folder: Path) -> None:
        """Have the fork server remove this folder when this process is gone."""
        self._send({"cmd": "own", "path": str(folder), "inode": folder.stat().st_ino})

    def on_lost(self, handler: Callable[[], None]) -> None:
        """Call `handler` when the fork server is gone (at once if it is)."""
        with self._lock:
            if not self._lost:
                self._lost_handlers.append(handler)
                return
        handler()

    def reset(self, timeout_s: float = 5) -> bool:
        """End all children; the server stays, for other ranks. False when it does not answer."""
        # Handlers are let go before the command is sent: what ends by it is nobody's any more.
        with self._lock:
            if self._lost:
                return False
            self._reset = Future()
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
        self._process.send_signal(signal.SIGCONT)

    def close(self, timeout_s: float = 5) -> None:
        """End the fork server with all its children; return when they are gone."""
        with self._lock:
            self._lost_handlers.clear()
        # A stopped process would not see that its input closes.
        self.wake()
        self._close_streams(self._process.stdin)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, command: Mapping[str, Any]) -> None:
        data = json.dumps(command).encode() + b"\n"
        stdin = self._process.stdin
        assert stdin is not None
        try:
            with self._lock:
                stdin.write(data)
                stdin.flush()
        except (OSError, ValueError) as error:
            raise SessionLost(_LOST) from error

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._events:
                self._handle(json.loads(line))
        self._process.wait()
        with self._lock:
            self._lost = True
            handlers, self._lost_handlers = self._lost_handlers, []
            futures: list[Future[Any]] = [self.ready, self._reset, *self._spawned.values()]
            for pid in list(self._pidfds):
                self._close_pidfd(pid)
        # Not under the lock, which is not reentrant: callbacks and handlers run on this thread, and
        # may call `signal` or `on_lost`.
        for future in futures:
            if not future.done():
                future.set_exception(SessionLost(_LOST))
        for handler in handlers:
            handler()
        self._close_streams(self._process.stdin, self._events)

    def _handle(self, event: Mapping[str, Any]) -> None:
        match event["event"]:
            case "ready":
                self.ready.set_result(event)
            case "spawned":
                self._spawned.pop(event["tag"]).set_result(event["pid"])
            case "error":
                self._spawned.pop(event["tag"]).set_exception(OSError(event["text"]))
            case "exited":
                with self._lock:
                    # It has been reaped: from now on its pid may be another process's.
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

    def _close_pidfd(self, pid: int) -> None:
        pidfd = self._pidfds.pop(pid, None)
        if pidfd is not None:
            os.close(pidfd)

    def _close_streams(self, *streams: Any) -> None:
        for stream in streams:
            with contextlib.suppress(OSError):  # of a server that is gone: a flush may fail
                stream.close()
