"""The fork server: one process per host that has torch loaded and starts ranks in milliseconds.

It reads commands and writes events as JSON lines on its standard input and output:

    <- {"cmd": "spawn", "tag": n, "spec": {...}}        see child.py
    <- {"cmd": "signal", "pid": p, "signal": s}         to a child of ours only
    <- {"cmd": "own", "path": folder}                   remove it when the session is gone
    -> {"event": "ready", "threads": n, "import_s": t, "mode": "fork"}
    -> {"event": "spawned", "tag": n, "pid": p}
    -> {"event": "exited", "pid": p, "code": c}         as soon as SIGCHLD arrives
    -> {"event": "error", "tag": n, "text": "..."}

It also serves between two imports: a controller, which needs no torch, can be started
while torch is being loaded. What is nice to have is imported when nothing is asked of it.

When its input closes, the session is gone (also by SIGKILL): it ends its children with
everything they started, removes the session's folder and leaves. It stays single
threaded, and it never touches CUDA: both are conditions for forking safely.

Other notebooks may ask it for servers of theirs, see siblings.py. One of these is another process
with other pipes, and otherwise as if it had been started itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ddp_notebook.launch import child, siblings
from ddp_notebook.launch.shared_memory import remove_orphans

GRACE_S = 0.5
"""How long a child may take to end after SIGTERM before it is killed."""
_PARENT_CHECK_S = 2.0
_IDLE_S = 1.0
"""After how long without a command it imports what is nice to have."""
_LOOK_AGAIN_S = 0.02

# numpy's BLAS starts a pool of threads when it is loaded; a forking process must have none.
_SINGLE_THREADED = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def session_members(leader: int) -> list[int]:
    """Processes in the session (as in setsid) that `leader` leads or led; Linux only."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[3]) == leader and fields[0] != b"Z":
            members.append(int(stat.parent.name))
    return members


def send_signal(pid: int, number: int) -> None:
    """Signal a process that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def end_sessions(leaders: Iterable[int]) -> None:
    """End what the processes `leaders`, now dead, left behind in their sessions.

    Resource trackers of multiprocessing end by themselves, and remove shared memory, when
    everybody who shares it is gone: they get some time for it.
    """
    left = list(leaders)
    for leader in left:
        kill_members(leader, spare_trackers=True)
    deadline = time.monotonic() + GRACE_S
    while any(session_members(leader) for leader in left) and time.monotonic() < deadline:
        time.sleep(_LOOK_AGAIN_S)
    for leader in left:
        kill_members(leader)


def kill_members(leader: int, *, spare_trackers: bool = False) -> None:
    """Kill what is left in the session of `leader`."""
    for member in session_members(leader):
        if not (spare_trackers and _is_resource_tracker(member)):
            send_signal(member, signal.SIGKILL)


def _is_resource_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _import(name: str) -> None:
    with contextlib.suppress(ImportError):  # an older release without this module
        importlib.import_module(name)


def _freeze() -> None:
    """Children share these pages until they write to them."""
    gc.collect()
    gc.freeze()
    gc.enable()


class ForkServer:
    """The loop of the process. `mode` is fork or process."""

    def __init__(self, mode: str, python_path: Sequence[str], point: str, door: int) -> None:
        self.mode = mode
        self.later: list[str] = []
        """Modules to import when there is nothing else to do."""
        self.python_path = list(python_path)
        self.point = point
        """Where those meet whose servers would be like this one; empty for nowhere."""
        self.door = socket.socket(fileno=door) if door >= 0 else None
        """Where others ask, as long as it is this server whom they ask."""
        self.notebook: int | None = None
        """A pidfd of the notebook's process, where that is not the parent."""
        self.commands = os.dup(0)
        self.events = os.dup(1)
        # What imports print must not end up between the events, nor eat the commands.
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1):
            os.dup2(nothing, fd)
        os.close(nothing)
        self.parent_pid = os.getppid()
        self.begin()

    def begin(self) -> None:
        """Be a server that has no children yet."""
        self.started_s = time.time()
        self.siblings: set[int] = set()
        """Servers of other notebooks that were forked here."""
        self.children: dict[int, subprocess.Popen[bytes] | None] = {}
        self.folders: list[str] = []
        self.orphaned: dict[int, float] = {}
        """Sessions whose leader is dead, and until when their members may end by themselves."""
        self.buffer = b""
        self.closed = False
        self.wake_read, self.wake_write = os.pipe()
        for fd in (self.wake_read, self.wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def send(self, **event: Any) -> None:
        """Write one event; a session that is gone does not read it, and the loop will notice."""
        data = json.dumps(event).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(self.events, data) :]

    def preload(self, modules: Iterable[str], later: Iterable[str] = ()) -> None:
        """Import what ranks will need, so that forked ones have it; `later` when idle."""
        started = time.monotonic()
        kept = {name: os.environ.get(name) for name in _SINGLE_THREADED}
        os.environ.update(dict.fromkeys(_SINGLE_THREADED, "1"))
        # matplotlib reads it once, when it is loaded; ranks draw as a notebook does.
        os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
        self.later = list(later)
        gc.disable()  # it looks at all that importing makes, again and again: a third of the time
        for name in modules:
            _import(name)
            self.turn(0)
            if self.closed:
                return
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        _freeze()
        self.send_ready(time.monotonic() - started)

    def send_ready(self, import_s: float) -> None:
        """Tell the session that ranks can be started."""
        threads = len(list(Path("/proc/self/task").glob("*"))) or 1
        seconds = round(import_s, 3)
        self.send(event="ready", threads=threads, import_s=seconds, mode=self.mode, pid=os.getpid())

    def loop(self) -> None:
        """Serve until the session is gone."""
        while not self.closed:
            self.see_to_others()
            wait_s = GRACE_S if self.orphaned else _IDLE_S if self.later else _PARENT_CHECK_S
            idle = not self.turn(wait_s)
            if idle and self.later and not self.orphaned:
                _import(self.later.pop(0))
                _freeze()

    def turn(self, wait_s: float) -> bool:
        """Serve what comes within `wait_s` and look after the children; False when nothing came.

        `closed` is set when the session is gone.
        """
        awaited = [self.commands, self.wake_read, self.door, self.notebook]
        fds = [each for each in awaited if each is not None]
        readable, _, _ = select.select(fds, [], [], wait_s)
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
        # A process forked by the notebook can hold our input open after the notebook died.
        alone = self.notebook is None and os.getppid() != self.parent_pid
        self.closed = self.closed or alone or self.notebook in readable
        return bool(readable)

    # -- servers of other notebooks ----------------------------------------------------

    def see_to_others(self) -> None:
        """Fork a server for each notebook that asks; be the one who is asked when nobody is."""
        if self.door is None:
            self.door = siblings.listen(self.point)
        while self.door is not None and (guest := siblings.admit(self.door)) is not None:
            gc.freeze()  # also what was loaded since the last time
            try:
                pid = os.fork()
            except OSError:  # no room for another process: that is no end of this one
                guest.close()
                return
            if pid == 0:
                self.become_sibling(guest)
            else:
                self.siblings.add(pid)
                guest.close()

    def become_sibling(self, guest: siblings.Guest) -> None:
        """In the child: be the server of the notebook that asked."""
        # Whatever happens from here on: these are not its own.
        self.children, self.folders, self.orphaned = {}, [], {}
        os.setsid()
        self.let_go()
        self.commands, self.events, self.notebook = guest
        self.later = []  # to load what is missing would copy more pages than it fills
        self.begin()
        self.send_ready(0.0)

    def let_go(self) -> None:
        """In a child: close what is this server's."""
        for fd in (self.commands, self.events, self.wake_read, self.wake_write):
            os.close(fd)
        if self.door is not None:
            self.door.close()
        if self.notebook is not None:
            os.close(self.notebook)
        self.door = self.notebook = None

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
                self.folders.append(command["path"])

    def spawn(self, spec: dict[str, Any]) -> int:
        """Start a child; its pid."""
        if self.mode == "process":
            return self.spawn_process(spec)
        pid = os.fork()
        if pid == 0:
            self.run_forked(spec)
        self.children[pid] = None
        return pid

    def run_forked(self, spec: dict[str, Any]) -> None:
        """In the child: drop what is the fork server's and become what `spec` says."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.let_go()
        gc.freeze()  # also what was loaded since the last time: a look at it would copy its pages
        gc.enable()
        child.become(spec, os.getppid())
        child.reseed()
        child.run(spec)

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
        """Tell of every child that ended, and end what it left behind in its session."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_read, 1 << 12)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.siblings:
                self.siblings.remove(pid)
                continue
            process = self.children.pop(pid, None)
            if process is not None and process.stdin is not None:
                process.returncode = os.waitstatus_to_exitcode(status)
                process.stdin.close()
            self.send(event="exited", pid=pid, code=os.waitstatus_to_exitcode(status))
            kill_members(pid, spare_trackers=True)
            self.orphaned[pid] = time.monotonic() + GRACE_S

    def end_orphans(self) -> None:
        """End what dead children left behind, when its time is over."""
        now = time.monotonic()
        for leader in [pid for pid, until in self.orphaned.items() if until <= now]:
            del self.orphaned[leader]
            kill_members(leader)
            remove_orphans((), self.started_s)

    def end(self) -> None:
        """End all children and what they started; remove the session's folders."""
        leaders = list(self.children)
        for pid in leaders:
            send_signal(pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while self.children and time.monotonic() < deadline:
            select.select([self.wake_read], [], [], max(0.0, deadline - time.monotonic()))
            self.reap()
        for pid in self.children:
            send_signal(pid, signal.SIGKILL)
        deadline = time.monotonic() + GRACE_S
        while self.children and time.monotonic() < deadline:
            select.select([self.wake_read], [], [], max(0.0, deadline - time.monotonic()))
            self.reap()
        end_sessions({*leaders, *self.orphaned})
        remove_orphans(self.folders, self.started_s, wait_s=1.0)
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)


def main(
    mode: str,
    preload: Sequence[str],
    later: Sequence[str],
    python_path: Sequence[str],
    point: str,
    door: int,
) -> None:
    """Run the fork server in this process until its standard input closes.

    `point` is where others that would be like it ask for theirs, `door` the descriptor of a socket
    that listens there; empty and -1 for none.
    """
    server = ForkServer(mode, python_path, point, door)
    try:
        server.preload(preload, later)
        server.loop()
    finally:
        server.end()
