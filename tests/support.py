"""What several tests need: waiting, a real kernel, and what is still alive of ours."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import queue
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
from jupyter_client.manager import KernelManager

RUN_TAG = "DDP_NOTEBOOK_TEST_RUN"
"""Environment variable that every process started by this test run inherits."""
ROUNDS = int(os.environ.get("DDP_NOTEBOOK_ROUNDS", "2"))
"""How often the tests of random moments try."""
GONE_WITHIN_S = 10.0
"""How long after an end something of ours may still be alive."""
FOLDER_PREFIX = "ddp_notebook-"
_POLL_S = 0.02
_SHARED_MEMORY = Path("/dev/shm")

T = TypeVar("T")


def eventually(predicate: Callable[[], T], deadline_s: float = GONE_WITHIN_S, what: str = "") -> T:
    """The first true value of `predicate`. Raises AssertionError when there is none in time.

    `what` says what was waited for.
    """
    deadline = time.monotonic() + deadline_s
    pause = threading.Event()
    while not (value := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {deadline_s:g} s: {what or predicate}")
        pause.wait(_POLL_S)
    return value


# --------------------------------------------------------------------------- what is left


@dataclass(frozen=True)
class Leftovers:
    """What exists of this test run beside the test process itself."""

    processes: frozenset[tuple[int, str]] = frozenset()
    """Process id and what it is."""
    files: frozenset[str] = frozenset()
    """Folders of sessions, sockets anywhere in the temporary folder, shared memory."""
    threads: frozenset[str] = frozenset()
    """Threads that would keep this process from ending."""

    def beyond(self, before: Leftovers) -> Leftovers:
        """What is here and was not there before."""
        return Leftovers(
            self.processes - before.processes,
            self.files - before.files,
            self.threads - before.threads,
        )

    def __bool__(self) -> bool:
        return bool(self.processes or self.files or self.threads)

    def __str__(self) -> str:
        lines = [f"process {pid}: {what}" for pid, what in sorted(self.processes)]
        return "\n".join([*lines, *sorted(self.files), *sorted(self.threads)])


def leftovers(spared: Mapping[int, str] | None = None) -> Leftovers:
    """What there is of ours now.

    `spared` maps the process of a fork server to its session's folder: that process, its
    descendants and that folder do not count.
    """
    spared = spared or {}
    alive = our_processes(spared)
    return Leftovers(
        frozenset((p.pid, _describe(p)) for p in alive),
        frozenset((*_files(spared), *_shared_memory())),
        frozenset(
            f"thread {t.name}"
            for t in threading.enumerate()
            if not t.daemon and t is not threading.main_thread()
        ),
    )


def our_processes(spared: Mapping[int, str] | None = None) -> list[psutil.Process]:
    """Live processes that this test process started, or that those started, however deep.

    Found by the tag in the environment they began with, so that an orphan is found too.
    """
    tag = os.environ[RUN_TAG]
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(RUN_TAG) == tag:
                found[process.pid] = process
    for process in psutil.Process().children(recursive=True):
        found[process.pid] = process
    for pid in spared or {}:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(pid)
            for process in (root, *root.children(recursive=True)):
                found.pop(process.pid, None)
    return [p for p in found.values() if _is_alive(p)]


def kill_our_processes() -> None:
    """End everything this test run started: what a failed test leaves must not fail the next."""
    for process in our_processes():
        with contextlib.suppress(psutil.Error):
            process.kill()


def is_alive(pid: int) -> bool:
    """True while `pid` is a process that has not ended."""
    try:
        return _is_alive(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())[:120].replace("\n", " ")
    return "(ended meanwhile)"


def session_folders() -> list[Path]:
    """The folders of sessions that exist now."""
    return sorted(Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"))


def _files(spared: Mapping[int, str]) -> Iterator[str]:
    kept = set(spared.values())
    for folder in session_folders():
        if str(folder) not in kept:
            yield f"folder {folder}"
    for folder, _, names in os.walk(tempfile.gettempdir()):
        if any(folder == each or folder.startswith(each + os.sep) for each in kept):
            continue
        for name in names:
            path = Path(folder, name)
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(path.lstat().st_mode):
                    yield f"socket {path}"


def _shared_memory() -> list[str]:
    """Entries of /dev/shm of this user that nobody outside of this test run holds."""
    if not _SHARED_MEMORY.is_dir():
        return []
    mine = []
    for path in _SHARED_MEMORY.iterdir():
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid():
                mine.append(str(path))
    if not mine:
        return []
    held_elsewhere = _mapped_by_others()
    return [f"shared memory {path}" for path in mine if path not in held_elsewhere]


def _mapped_by_others() -> set[str]:
    ours = {os.getpid(), *(p.pid for p in our_processes())}
    held: set[str] = set()
    for process in psutil.process_iter():
        if process.pid not in ours:
            with contextlib.suppress(psutil.Error, OSError):
                held.update(m.path for m in process.memory_maps() if m.path.startswith("/dev/shm"))
                held.update(f.path for f in process.open_files() if f.path.startswith("/dev/shm"))
    return held


# --------------------------------------------------------------------------- a session's processes


@dataclass(frozen=True)
class Pids:
    """The processes of one running session, by what they are."""

    fork_server: int
    controller: int
    keeper: int
    ranks: tuple[int, ...]
    folder: str

    @property
    def all(self) -> tuple[int, ...]:
        """Every one of them."""
        return (self.fork_server, self.controller, self.keeper, *self.ranks)


def look_inside(session: Any) -> dict[str, Any]:
    """The fields of `Pids`. The one place in the tests that looks inside a session."""
    processes = session._processes
    return {
        "fork_server": processes.fork_server.pid,
        "controller": processes.cluster._cluster.controller.pid,
        "keeper": processes._keeper_pid,
        "ranks": [state.pid for state in session.record.snapshot.ranks],
        "folder": str(processes.folder),
    }


def pids_of(session: Any) -> Pids:
    """The processes behind a running session."""
    fields = look_inside(session)
    return Pids(**{**fields, "ranks": tuple(fields["ranks"])})


# --------------------------------------------------------------------------- a real kernel


@dataclass
class Reply:
    """How a cell of a real kernel ended."""

    status: str
    """ok, error, or dead when the kernel did not live to say."""
    text: str
    """Everything it printed or displayed as text; a display that was updated, at its last."""
    ename: str = ""
    evalue: str = ""
    elapsed_s: float = 0.0
    ended_at: float = 0.0
    """time.monotonic() of the reply."""
    messages: list[Mapping[str, Any]] = field(default_factory=list)


class Kernel:
    """A notebook kernel in a process of its own, driven as a front end does.

    Messages are read only in the methods, on the caller's thread.
    """

    def __init__(self) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel()
        self._connect()

    def _connect(self) -> None:
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    @property
    def pid(self) -> int:
        """The kernel's process."""
        pid: int = self.manager.provisioner.pid
        return pid

    def send(self, code: str) -> str:
        """Send a cell and do not wait for it; its message id."""
        message_id: str = self.client.execute(code)
        return message_id

    def run(self, code: str, timeout_s: float = 60) -> Reply:
        """Run a cell to its end."""
        return self.finish(self.send(code), timeout_s)

    def run_well(self, code: str, timeout_s: float = 60) -> Reply:
        """Run a cell that must end well."""
        reply = self.run(code, timeout_s)
        assert reply.status == "ok", f"{code!r} ended with {reply.evalue}\n{reply.text}"
        return reply

    def listen(self, message_id: str, timeout_s: float) -> Iterator[Mapping[str, Any]]:
        """What the kernel publishes for a cell, as it arrives; for `timeout_s`, or to its end."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                message = self.client.get_iopub_msg(timeout=left_s)
            except queue.Empty:
                return
            if message["parent_header"].get("msg_id") != message_id:
                continue
            yield message
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return

    def wait_for_text(self, message_id: str, wanted: str, timeout_s: float = 60) -> None:
        """Read until the cell has shown `wanted`."""
        for message in self.listen(message_id, timeout_s):
            if wanted in text_of(message):
                return
            assert message["msg_type"] != "error", "\n".join(message["content"]["traceback"])
        raise AssertionError(f"{wanted!r} did not appear within {timeout_s:g} s")

    def finish(self, message_id: str, timeout_s: float = 60) -> Reply:
        """Wait for the end of a cell that was sent."""
        started = time.monotonic()
        deadline = started + timeout_s
        while True:
            try:
                reply = self.client.get_shell_msg(timeout=min(0.5, deadline - time.monotonic()))
            except queue.Empty:
                if not self.manager.is_alive():
                    return Reply("dead", "", elapsed_s=time.monotonic() - started)
                if time.monotonic() < deadline - 0.5:
                    continue
                raise AssertionError(f"the cell did not end within {timeout_s:g} s") from None
            if reply["parent_header"].get("msg_id") == message_id:
                break
        ended_at = time.monotonic()
        messages = list(self.listen(message_id, 10))
        content = reply["content"]
        return Reply(
            status=content["status"],
            text=text_of_all(messages),
            ename=content.get("ename", ""),
            evalue=content.get("evalue", ""),
            elapsed_s=ended_at - started,
            ended_at=ended_at,
            messages=messages,
        )

    def init(self, world_size: int = 2) -> float:
        """`%load_ext` and `%ddp_init`, which must end well; seconds from sending to the end."""
        started = time.monotonic()
        self.run_well("%load_ext ddp_notebook")
        reply = self.run_well(f"%ddp_init --world-size {world_size}")
        return reply.ended_at - started

    def pids(self) -> Pids:
        """The processes of the kernel's session."""
        fields = self.ask(
            "look_inside(get_ipython()._ddp_notebook_magics.session)",
            f"from typing import Any\n{inspect.getsource(look_inside)}",
        )
        return Pids(**{**fields, "ranks": tuple(fields["ranks"])})

    def ask(self, expression: str, definitions: str = "") -> Any:
        """The value of an expression in the kernel, which must be writable as JSON."""
        reply = self.run_well(
            f"{definitions}\nimport json; print('answer', json.dumps({expression}))"
        )
        line = next(line for line in reply.text.splitlines() if line.startswith("answer "))
        return json.loads(line.removeprefix("answer "))

    def kill(self) -> None:
        """End the kernel's process with SIGKILL, and nothing else."""
        os.kill(self.pid, signal.SIGKILL)

    def restart(self, *, now: bool) -> None:
        """What a front end does on "restart kernel"."""
        self.client.stop_channels()
        self.manager.restart_kernel(now=now)
        self._connect()

    def close(self, *, now: bool = False) -> None:
        """Shut the kernel down, and forget it."""
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=now)
        self.manager.cleanup_resources()


def text_of(message: Mapping[str, Any]) -> str:
    """The text in one message of a kernel."""
    content = message["content"]
    if message["msg_type"] == "stream":
        return str(content["text"])
    return str(content.get("data", {}).get("text/plain", ""))


def text_of_all(messages: Sequence[Mapping[str, Any]]) -> str:
    """What a reader of the cell sees as text: of a display that was updated, the last."""
    parts: list[tuple[str, str]] = []
    for message in messages:
        shown_as = message["content"].get("transient", {}).get("display_id", "")
        text = text_of(message)
        if message["msg_type"] == "update_display_data":
            parts = [(i, text if i == shown_as else old) for i, old in parts]
        elif text:
            parts.append((shown_as, text))
    return "\n".join(text for _, text in parts)
