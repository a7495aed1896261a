"""What several tests need: waiting, a real kernel, and what is still alive of ours."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import psutil
import pytest
from lazy import lazily

from ddp_notebook import testing
from ddp_notebook.errors import DDPError, Stuck
from ddp_notebook.launch import lab_hosts
from ddp_notebook.launch.client import ForkServerClient, can_fork
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.model import Diagnosis
from ddp_notebook.session import InitOptions, Session

RUN_TAG = "DDP_NOTEBOOK_TEST_RUN"
"""Environment variable that every process started by this test run inherits."""
ROUNDS = int(os.environ.get("DDP_NOTEBOOK_ROUNDS", "1"))
"""How often the tests of random moments try."""
SEED = int(os.environ.get("DDP_NOTEBOOK_SEED", "0"))
"""What they draw their moments from: the same each time, so that a run says the same as the last;
`DDP_NOTEBOOK_SEED=$RANDOM` looks further."""
LAZY = bool(os.environ.get("DDP_NOTEBOOK_LAZY"))
"""The ranks that tests of a module share are as those of NCCL (`lazy`), as far as can be here."""
GONE_WITHIN_S = 10.0
"""How long after an end something of ours may still be alive."""
FOLDER_PREFIX = "ddp_notebook-"
NOBODY = 65534
"""Another user than root."""
_SHARED_MEMORY = Path("/dev/shm")

# Cells for ranks: one that goes on until a file is there, and one that hangs.
GATE = (
    "import os, time\n"
    "print('begun')\n"
    "while not os.path.exists({gate!r}):\n"
    "    time.sleep(0.01)\n"
    "print('after the gate')"
)
HANG = "if rank == 0:\n    dist.all_reduce(torch.ones(1))"

T = TypeVar("T")


def eventually(
    predicate: Callable[[], T],
    deadline_s: float = GONE_WITHIN_S,
    what: str = "",
    *,
    poll_s: float = 0.02,
) -> T:
    """The first true value of `predicate`. Raises AssertionError when there is none in time.

    `what` says what was waited for; `predicate` is looked at every `poll_s`, and the longer it
    takes the less often, to a fifth: to look costs time. `deadline_s` is a quiet machine's.
    """
    deadline_s = scaled_for_load(deadline_s)
    began_s = time.monotonic()
    pause = threading.Event()
    while not (value := predicate()):
        waited_s = time.monotonic() - began_s
        if waited_s > deadline_s:
            raise AssertionError(f"not within {deadline_s:g} s: {what or predicate}")
        pause.wait(min(max(poll_s, waited_s / 10), 5 * poll_s))
    return value


def as_nobody(work: Callable[[], Any]) -> Any:
    """What `work` gives in a process of another user, as JSON has it."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(write, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        text = told.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def lacking(why: str) -> NoReturn:
    """Skip a test where something is not there; in CI that is a failure."""
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)


def need_lab_hosts() -> None:
    """Skip where the fault lab can have no second host; in CI that is a failure."""
    why = lab_hosts.why_not()
    if why:
        lacking(f"no second host: {why}")


def with_entry_point(folder: Path) -> Path:
    """A folder for PYTHONPATH, in which torch finds our entry point as when we are installed."""
    metadata = folder / "site" / "ddp_nb_entry-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ddp-nb-entry\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        "[torch.backends]\nentry = ddp_notebook.autoload:load\n"
    )
    return metadata.parent


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


_spared: dict[int, str] = {}
"""Sessions that may outlive a test: process of the fork server to folder."""
_shared: list[Any] = []
"""The same sessions themselves."""


@contextlib.contextmanager
def spared(session: Any) -> Iterator[None]:
    """Several tests share `session`: its processes and its folder do not count as left over."""
    pids = pids_of(session)
    _spared[pids.fork_server] = pids.folder
    _shared.append(session)
    try:
        yield
    finally:
        _shared.remove(session)
        del _spared[pids.fork_server]


@contextlib.contextmanager
def shared_session(options: InitOptions) -> Iterator[Session]:
    """A session that several tests share."""
    session = Session()
    try:
        session.init(options)
        with spared(session), lazily(session) if LAZY else contextlib.nullcontext():
            yield session
    finally:
        session.shutdown()


_spared_threads: tuple[str, ...] = ()
"""How the names of threads begin that may outlive a test."""


@contextlib.contextmanager
def spared_processes(
    pids: Iterable[int], folder: str = os.devnull, threads: tuple[str, ...] = ()
) -> Iterator[None]:
    """Several tests share these processes, what those start, the files in `folder`, threads."""
    global _spared_threads
    roots, threads_before = dict.fromkeys(pids, folder), _spared_threads
    _spared.update(roots)
    _spared_threads += threads
    try:
        yield
    finally:
        _spared_threads = threads_before
        for pid in roots:
            del _spared[pid]


warm: set[int] = set()
"""Processes kept for the whole run, so that sessions that begin meanwhile load no torch."""
_kept: list[ForkServerClient] = []
"""A fork server that no session has; empty where tests keep none."""


class KeptForkServer(ForkServerClient):
    """One that is reset and kept for the next session, as by `%ddp_shutdown`, when one closes it.

    Unless it is not what the next session would start.
    """

    def close(self, timeout_s: float = 5) -> None:
        """Keep it, or end it."""
        self.wake()
        if self.alive and not _kept and self.equals_a_new_one() and self.reset():
            _kept.append(self)
        else:
            super().close(timeout_s)
            warm.discard(self.pid)


def fork_server(mode: str = "fork") -> ForkServerClient:
    """The one that was kept, or a new one."""
    if mode == "fork" and _kept:
        server = _kept.pop()
        if server.alive and server.equals_a_new_one():
            return server
        _kept.append(server)  # for the sessions that follow, with the usual environment
    if mode != "fork" or _kept:
        return ForkServerClient(mode)
    server = KeptForkServer(mode)
    warm.add(server.pid)
    return server


@contextlib.contextmanager
def warm_fork_server() -> Iterator[None]:
    """Torch is loaded once for the sessions of this process that begin meanwhile.

    Loading it takes seconds. A test of a cold start changes the environment (`cold`).
    """
    from ddp_notebook.session import pool

    if not can_fork():
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "ForkServerClient", fork_server)
        _kept.append(fork_server())
        try:
            yield
        finally:
            while _kept:
                ForkServerClient.close(_kept.pop())


def run_with_torch(source: str, folder: Path) -> None:
    """Run a script in a process that has torch loaded, as a rank has. Fails as it does.

    The fork server is the one that is kept for sessions.
    """
    script, log = folder / "script.py", folder / "log"
    script.write_text(source)
    call = ["runpy:run_path", {"path_name": str(script), "run_name": "__main__"}]
    spec = {"calls": [call], "env": dict(os.environ), "cwd": str(folder), "log": str(log)}
    ended: Future[int] = Future()
    server = fork_server()
    try:
        server.ready.result(scaled_for_load(60))
        server.spawn(spec, ended.set_result)
        assert ended.result(scaled_for_load(60)) == 0, log.read_text()
    finally:
        server.close()


def renew_shared_ranks() -> None:
    """New processes for the ranks of shared sessions: a test failed and may have left them busy."""
    for session in _shared:
        with contextlib.suppress(DDPError):  # a session that ended has no ranks to renew
            session.restart()


def leftovers() -> Leftovers:
    """What there is of ours now."""
    return Leftovers(
        frozenset((p.pid, _describe(p)) for p in our_processes()),
        frozenset((*_files(), *_shared_memory())),
        frozenset(
            f"thread {t.name}"
            for t in threading.enumerate()
            if not t.daemon
            and t is not threading.main_thread()
            and not t.name.startswith(_spared_threads)
        ),
    )


_known: dict[int, bool] = {}
"""The processes at the last look, by id, and whether they are ours. That does not change: a
process has the tag, or a parent that is ours, from its first moment."""


def our_processes() -> list[psutil.Process]:
    """Live processes that this test process started, or that those started, however deep.

    Found by the tag in the environment they began with, so that an orphan is found too. Only
    those that were not there at the last look are read: this is done before and after each test.
    """
    pids = set(psutil.pids())
    for gone in _known.keys() - pids:
        del _known[gone]
    _known[os.getpid()] = True
    new = sorted(pids - _known.keys())
    tagged = {pid: _has_the_tag(pid) for pid in new}
    for pid in new:
        lineage = [pid]
        while not tagged.get(lineage[-1], True):
            lineage.append(_parent(lineage[-1]))
        _known[pid] = tagged.get(lineage[-1]) or _known.get(lineage[-1], False)
    ours = {pid for pid, is_ours in _known.items() if is_ours}
    shared = {*_spared}
    parents = {pid: _parent(pid) for pid in ours} if shared else {}
    while more := {pid for pid, parent in parents.items() if parent in shared} - shared:
        shared |= more
    found = []
    for pid in ours - shared - warm - {os.getpid()}:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return [p for p in found if _is_alive(p)]


def _has_the_tag(pid: int) -> bool:
    with contextlib.suppress(psutil.Error, OSError):
        return psutil.Process(pid).environ().get(RUN_TAG) == os.environ[RUN_TAG]
    return False


def _parent(pid: int) -> int:
    """0 when there is none any more."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).ppid() or 0
    return 0


def clear_away(left: Leftovers) -> None:
    """End and remove what a failed test left: it must not fail the next."""
    for process in our_processes():
        with contextlib.suppress(psutil.Error):
            process.kill()
    for each in left.files:
        path = Path(each[each.index("/") :])
        with contextlib.suppress(OSError):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


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


def _files() -> Iterator[str]:
    kept = set(_spared.values())
    for folder in session_folders():
        if str(folder) not in kept:
            yield f"folder {folder}"
    for folder, _, names in os.walk(tempfile.gettempdir()):
        if any(folder == each or folder.startswith(each + os.sep) for each in kept):
            continue
        for name in names:
            path = Path(folder, name)
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(path.lstat().st_mode) and not _is_bound(path):
                    yield f"socket {path}"


def _is_bound(path: Path) -> bool:
    """A process has it, and whether that one is left behind is asked of the process.

    A fork server's is made under another name, and then linked.
    """
    bound = Path("/proc/net/unix").read_text().splitlines()
    return any(line.endswith(f" {path}") or f" {path}." in line for line in bound)


def _shared_memory() -> list[str]:
    """Entries of /dev/shm made during this test run that nobody outside of it holds."""
    started_at = psutil.Process().create_time()
    if not _SHARED_MEMORY.is_dir():
        return []
    mine = []
    for path in _SHARED_MEMORY.iterdir():
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.getuid() and status.st_ctime >= started_at:
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


def stuck(session: Session, source: str) -> Diagnosis:
    """The diagnosis of cell 7, in which ranks wait for ever."""
    with pytest.raises(Stuck) as caught:
        session.run_cell(source, number=7).raise_for_error()
    return caught.value.diagnosis


# --------------------------------------------------------------------------- a session's processes


@dataclass(frozen=True)
class Pids:
    """The processes of one running session, by what they are."""

    fork_server: int
    controller: int
    store: int
    ranks: tuple[int, ...]
    folder: str

    @property
    def all(self) -> tuple[int, ...]:
        """Every one of them."""
        return (self.fork_server, self.controller, self.store, *self.ranks)


def pids_of(session: Any) -> Pids:
    """The processes behind a running session."""
    fields = testing.pids_of(session)
    return Pids(**{**fields, "ranks": tuple(fields["ranks"])})


# --------------------------------------------------------------------------- shells


@contextlib.contextmanager
def ipython_shell() -> Iterator[Any]:
    """A fresh real IPython shell in this process, with the extension loaded until the end."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))
    shell.run_line_magic("load_ext", "ddp_notebook")
    try:
        yield shell
    finally:
        shell.run_line_magic("unload_ext", "ddp_notebook")
        shell.restore_sys_module_state()
        InteractiveShell.clear_instance()


def begun(session: Any) -> None:
    """Wait until the first line of every rank in the run that goes on has been heard of.

    A rank writes it to its file first, so `Session.output` may know it sooner than the run does.
    """

    def heard() -> bool:
        run = session.runs.current
        return run is not None and all("\n" in run.events.written(rank) for rank in run.ranks)

    eventually(heard, 30, "the first line")


@contextlib.contextmanager
def shared_shell(world_size: int) -> Iterator[Any]:
    """A shell with ranks that several tests share."""
    with ipython_shell() as shell:
        assert shell.run_cell(f"%ddp_init --world-size {world_size} --device cpu").success
        session = session_of(shell)
        with spared(session), lazily(session) if LAZY else contextlib.nullcontext():
            yield shell


def session_of(shell: Any) -> Any:
    """The session behind the magics of a shell."""
    return shell._ddp_notebook_magics.session
