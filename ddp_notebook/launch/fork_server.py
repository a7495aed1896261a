"""The fork server: one process per host that has torch loaded and starts ranks in milliseconds.

It reads commands from standard input and writes events to a pipe of its own, as JSON lines:

    <- {"cmd": "spawn", "tag": n, "spec": {...}}        see child.py
    <- {"cmd": "signal", "pid": p, "signal": s}         to a child of ours only
    <- {"cmd": "own", "path": folder, "inode": i}       remove it when the session is gone
    <- {"cmd": "reset"}                                 end all children of the session
    -> {"event": "ready", "threads": n, "import_s": t, "mode": "fork"}
    -> {"event": "spawned", "tag": n, "pid": p}
    -> {"event": "exited", "pid": p, "code": c, "peak_bytes": n}         as soon as SIGCHLD arrives
    -> {"event": "error", "tag": n, "text": "..."}
    -> {"event": "reset"}                               nothing is left: ready for other ranks

It also serves commands between two imports: a controller, which needs no torch, can be started
while torch is being loaded. Optional modules are imported while no command waits.

When its input closes, the session is gone (even after SIGKILL): it ends its children with
everything they started, removes the session's folder and exits. It stays single-threaded and never
initializes CUDA, because forking would not be safe.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ddp_notebook.launch import child
from ddp_notebook.launch.preload import (
    ENGINE_MODULES,
    IDLE_MODULES,
    TORCH_MODULES,
    draw_together,
)
from ddp_notebook.launch.process_groups import (
    GRACE_S,
    adopt_orphans,
    children_of,
    end_sessions,
    is_resource_tracker,
    kill_members,
    send_signal,
)
from ddp_notebook.launch.session_folder import Held, hold, remove_shared_memory

# numpy's BLAS starts a thread pool when it is loaded; a process that forks must have no threads.
_SINGLE_THREADED = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def _import(name: str) -> None:
    with contextlib.suppress(ImportError):  # an older release without this module
        child.load(name)


def _freeze() -> None:
    """Exempt what was loaded since the last time from garbage collection: children keep sharing
    its pages. Also before a fork while modules are loaded."""
    child.disown_finalizers()  # here, once: children would copy their pages
    gc.freeze()


class ForkServer:
    """The loop of the process. `mode` is fork or process; events are written to `events`."""

    def __init__(self, mode: str, python_path: Sequence[str], events: int) -> None:
        self.mode = mode
        self.idle_modules: list[str] = []
        """Modules still to import while no command waits."""
        self.python_path = list(python_path)
        self.commands = os.dup(0)
        self.events = events
        os.set_inheritable(events, False)
        null = os.open(os.devnull, os.O_RDONLY)  # imports may not read commands
        os.dup2(null, 0)
        os.close(null)
        self.parent_pid = os.getppid()
        self.begin_session()
        self.buffer = b""
        self.closed = self.broken = False
        self.wake_read, self.wake_write = os.pipe()
        for fd in (self.wake_read, self.wake_write):
            os.set_blocking(fd, False)
        # A handler in Python runs between two bytecodes and so never while select() sleeps: that
        # the signal's number is written to a pipe wakes select(), and no SIGCHLD is missed in the
        # moment before it sleeps. A full pipe wakes it as well.
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def begin_session(self) -> None:
        """Nothing belongs to the notebook's session yet."""
        self.started_s = time.time()
        self.children: dict[int, subprocess.Popen[bytes] | None] = {}
        self.folders: list[Held] = []
        """The session's folders."""
        self.orphaned: dict[int, float] = {}
        """Sessions whose leader is dead, and until when their members may end by themselves."""

    def send(self, **event: Any) -> None:
        """Write one event. If the session is gone the write is lost; the loop will notice."""
        if self.broken:  # it ends its children: their ends must not look like their own
            return
        # This may block while the pipe is full: the client empties it on a thread of its own.
        data = json.dumps(event).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(self.events, data) :]

    def preload(self, modules: Iterable[str]) -> None:
        """Import what ranks will need, so that forked ones have it loaded."""
        started = time.monotonic()
        previous = {name: os.environ.get(name) for name in _SINGLE_THREADED}
        os.environ.update(dict.fromkeys(_SINGLE_THREADED, "1"))
        # matplotlib reads it once, when it is loaded; ranks plot as a notebook does.
        os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
        gc.disable()  # repeated scans of all new objects would take a third of the time
        for name in modules:
            _import(name)
            self.turn(0)
            if self.closed:
                return
        for name, value in previous.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        if "ddp_notebook.rank.torch_private" in sys.modules:  # else torch does not load here
            child.call("ddp_notebook.rank.torch_private:forget_rules", {})
        _freeze()
        if modules:
            draw_together()
        gc.enable()
        threads = len(list(Path("/proc/self/task").glob("*"))) or 1
        seconds = round(time.monotonic() - started, 3)
        self.send(event="ready", threads=threads, import_s=seconds, mode=self.mode)

    def loop(self) -> None:
        """Serve until the session is gone."""
        while not self.closed:
            # With children an import would copy the pages that they share, more than it saves.
            to_import = self.idle_modules and not (self.children or self.orphaned)
            wait_s = GRACE_S if self.orphaned else 1.0 if to_import else 2.0
            idle = not self.turn(wait_s)
            if idle and to_import and not self.children:
                _import(self.idle_modules.pop(0))
                _freeze()

    def turn(self, wait_s: float) -> bool:
        """Serve the commands of the next `wait_s` seconds and reap children; False for no event.

        Sets `closed` when the session is gone.
        """
        readable, _, _ = select.select([self.commands, self.wake_read], [], [], wait_s)
        if self.wake_read in readable:
            self.reap()
        self.end_orphans()
        if self.commands in readable:
            data = os.read(self.commands, 1 << 16)
            self.closed = not data
            self.buffer += data
            while b"\n" in self.buffer:
                line, self.buffer = self.buffer.split(b"\n", 1)
                self.serve(json.loads(line))
        # A process that the notebook forked can hold our input open after the notebook died.
        self.closed = self.closed or os.getppid() != self.parent_pid
        return bool(readable)

    # -- children ----------------------------------------------------------------------

    def serve(self, command: dict[str, Any]) -> None:
        """Carry out one command."""
        match command["cmd"]:
            case "spawn":
                try:
                    pid = self.spawn(command["spec"])
                except OSError as error:
                    self.send(event="error", tag=command["tag"], text=str(error))
                else:
                    self.send(event="spawned", tag=command["tag"], pid=pid)
            case "signal" if command["pid"] in self.children:
                send_signal(command["pid"], command["signal"])
            case "own":
                self.folders.append(hold(Path(command["path"]), command["inode"]))
            case "reset":
                self.end()
                self.begin_session()
                self.send(event="reset")

    def spawn(self, spec: dict[str, Any]) -> int:
        """Start a child; return its pid."""
        if self.mode == "process":
            return self.spawn_process(spec)
        # What is not frozen yet would be scanned by the child's garbage collector, which writes to
        # the header of each object: the pages would be shared no longer.
        _freeze()
        # fork() copies the thread that calls it and no other. A lock that another thread holds at
        # that moment would stay locked forever in the child: hence no thread in this process.
        pid = os.fork()
        if pid == 0:
            self.run_forked(spec)
        self.children[pid] = None
        return pid

    def run_forked(self, spec: dict[str, Any]) -> NoReturn:
        """In the child: close what belongs to the fork server and become what `spec` says."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for fd in (self.commands, self.events, self.wake_read, self.wake_write):
                os.close(fd)
            # A lock of flock(2) belongs to the open file and not to the process: held on in the
            # child, it would keep a dead session's folder from being swept.
            for held in self.folders:
                held.let_go()
            # A child that is forked between two imports of `preload` has it disabled.
            gc.enable()
            child.start(spec, os.getppid())
        finally:  # in the server's own frames it would end the session's other processes
            os._exit(1)

    def spawn_process(self, spec: dict[str, Any]) -> int:
        """Start a child as an ordinary Python process (no torch loaded yet)."""
        code = (
            "import json, sys; sys.path[:] = json.loads(sys.argv.pop());"
            "from ddp_notebook.launch.child import main; main()"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(self.python_path)],
            stdin=subprocess.PIPE,
            env=spec["env"],
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps({**spec, "parent_pid": os.getpid()}).encode() + b"\n")
        process.stdin.flush()
        self.children[process.pid] = process  # keeps its standard input, the lifeline, open
        return process.pid

    def reap(self) -> None:
        """Report every child that ended, and kill what it left running in its session."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_read, 1 << 12)
        # Signals do not queue: one SIGCHLD may stand for several children.
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                break
            if pid not in self.children:  # one that was adopted
                continue
            process = self.children.pop(pid)
            if process is not None and process.stdin is not None:
                process.returncode = os.waitstatus_to_exitcode(status)
                process.stdin.close()
            code, peak = os.waitstatus_to_exitcode(status), used.ru_maxrss << 10
            self.send(event="exited", pid=pid, code=code, peak_bytes=peak)
            # What it started is found by its session (setsid), whose number is the dead leader's
            # pid. The kernel gives that pid to nobody else while a member of the session lives.
            kill_members(pid, spare_trackers=True)
            self.orphaned[pid] = time.monotonic() + GRACE_S
        self.end_adopted(spare_trackers=True)

    def end_adopted(self, *, spare_trackers: bool) -> bool:
        """Kill what dead children have left in whatever session; False where there is nothing.

        A child of ours adopts its own orphans, so what comes here is of one that is dead. What
        those leave comes here when they end.
        """
        adopted = [pid for pid in children_of(os.getpid()) if pid not in self.children]
        adopted = [pid for pid in adopted if not (spare_trackers and is_resource_tracker(pid))]
        for pid in adopted:
            send_signal(pid, signal.SIGKILL)
        return bool(adopted)

    def end_orphans(self) -> None:
        """Kill what dead children left running, once its grace period is over."""
        now = time.monotonic()
        for leader in [pid for pid, until in self.orphaned.items() if until <= now]:
            del self.orphaned[leader]
            kill_members(leader)
            if not self.orphaned:
                self.end_adopted(spare_trackers=False)
            remove_shared_memory((), self.started_s)

    def end(self) -> None:
        """End all children and what they started; remove the session's folders."""
        leaders = list(self.children)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self.children:
                send_signal(pid, number)
            deadline = time.monotonic() + GRACE_S
            while self.children and time.monotonic() < deadline:
                select.select([self.wake_read], [], [], max(0.0, deadline - time.monotonic()))
                self.reap()
        end_sessions({*leaders, *self.orphaned})
        deadline = time.monotonic() + GRACE_S
        while self.end_adopted(spare_trackers=False) and time.monotonic() < deadline:
            select.select([self.wake_read], [], [], 0.02)
            self.reap()
        names = [str(folder.path) for folder in self.folders]
        remove_shared_memory(names, self.started_s, wait_s=1.0)
        for folder in self.folders:
            folder.remove()


def main(mode: str, python_path: Sequence[str], events: int) -> None:
    """Run the fork server in this process until its input closes. For arguments see `ForkServer`.

    In mode "process" children are ordinary processes, so nothing is imported beforehand.
    """
    adopt_orphans()
    server = ForkServer(mode, python_path, events)
    fork = mode == "fork"
    try:
        server.idle_modules = list(IDLE_MODULES) if fork else []
        server.preload([*ENGINE_MODULES, *TORCH_MODULES] if fork else [])
        server.loop()
    finally:
        # Whatever raised in the loop: the session hears that the server has ended, and not first
        # that its ranks did.
        server.broken = not server.closed
        server.end()
    # Without Python's shutdown, which takes a while with torch loaded.
    child.leave(0)
