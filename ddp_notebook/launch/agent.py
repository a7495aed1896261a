"""A host's agent: the fork server of that host, and what passes between it and the notebook.

It is started there by `ssh_hosts`, reads its settings from the first line of its standard input,
and lives as long as that stays open and the notebook is heard on the wire. It loads no torch, and
listens at nothing beyond the session's folder. What it is told, and tells, over the wire:

    <- spawn tag, spec       -> spawned tag, pid | refused tag, why;  exited pid, code, peak_bytes
    <- signal pid, number    <- ask tag, name, arguments     -> answer tag, value
    <- open n, socket; data n; shut n                        -> data n; shut n
    <- clock ns              -> clock ns, ns                 -> hello facts;  loading cpu_s;  ready
    -> event source          -> part name, begin             -> ending why
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from ddp_notebook.launch import host_facts
from ddp_notebook.launch.client import ForkServerClient
from ddp_notebook.launch.process_groups import adopt_orphans, descendants, send_signal
from ddp_notebook.launch.process_ids import HOST_VARIABLE, process_id
from ddp_notebook.launch.session_folder import (
    Held,
    files_left,
    make_folder,
    remove_shared_memory,
    sweep_stale_folders,
)
from ddp_notebook.launch.twin import Connections, Mirror
from ddp_notebook.launch.wire import Wire, relay_address
from ddp_notebook.model import format_bytes

_LOOKS_EACH_S = 0.05
_COMPARES_EVERY = 20
"""At each so-many-th look everything is compared."""
_LARGEST_SETTINGS = 1 << 20
_EVENTS_AT_ONCE, _EVENTS_KEPT = 64, 5000
"""Messages of events."""
_LEAST_FREE_BYTES, _LEAST_FILES = 1 << 26, 100
"""The least that a session's folder needs."""
_NOT_PASSED_ON = ("IPP_", "SLURM_", "OMPI_", "PMIX_", "SSH_")
"""How the names of variables begin that say where *this* process was started."""


def main(say: Callable[..., None]) -> None:
    """Be the agent until the end of the session; `say` writes a line to standard output."""
    settings = json.loads(_first_line())
    os.environ[HOST_VARIABLE] = str(settings["host"])  # before a fork server is started
    adopt_orphans()
    with contextlib.ExitStack() as undo:
        try:
            held = make_folder()
            undo.callback(held.remove)
            agent = Agent(settings, held)
        except (OSError, zmq.ZMQError) as error:
            say(failed=f"its agent cannot start: {error}")
            return
        undo.pop_all()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: agent.ended.set())
    say(agent=os.getpid())
    agent.serve()
    os._exit(0)


def _first_line() -> bytes:
    """Read the settings, and not a byte more: what follows is only the end of standard input."""
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < _LARGEST_SETTINGS:
        byte = os.read(0, 1)
        if not byte:
            os._exit(1)
        line += byte
    return bytes(line)


class Agent:
    """The agent of one session. Raises OSError and ZMQError where its folder cannot be used."""

    def __init__(self, settings: dict[str, Any], held: Held) -> None:
        self._settings = settings
        self._held = held
        self._folder = self._held.path
        self._began_s = time.time()
        self.ended = threading.Event()
        self._why = "it was told to end"
        self._looks = 0
        for name in ("security", "output", "log"):
            (self._folder / name).mkdir(mode=0o700)
        connection = self._folder / "security" / "ipcontroller-ddp-engine.json"
        with open(os.open(connection, os.O_WRONLY | os.O_CREAT, 0o600), "w") as stream:  # noqa: PTH123
            json.dump(settings["connection"], stream)
        threading.Thread(target=sweep_stale_folders, name="ddp-sweep", daemon=True).start()
        self._current_folder, self._shared = _current_folder(settings)
        self._server = self._fork_server()
        self._context: Any = zmq.Context()
        self._events: Any = self._context.socket(zmq.PULL)
        # While the link takes no more this fills up, then what ranks keep, and they drop and count.
        # Not sooner: of a rank that ends while it is full, libzmq drops what was not read yet.
        self._events.rcvhwm = _EVENTS_KEPT
        with contextlib.suppress(zmq.ZMQError):
            self._events.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
        self._events.bind(f"ipc://{self._folder}/events.sock")
        (self._folder / "events.sock").chmod(0o600)
        self._mirror = Mirror(self._folder, self._send)
        self._connections = Connections(lambda: self._wire, self._folder, self._mirror.look)
        self._wire = Wire(
            relay_address(settings["connection"]),
            bytes.fromhex(settings["key"]),
            settings["name"],
            settings["near"],
            self._receive,
            near=False,
        )

    def _send(self, *message: Any, blob: bytes = b"") -> None:
        self._wire.send(*message, blob=blob)

    def _fork_server(self) -> ForkServerClient:
        """Start it. Ranks import what lies beside the notebook, as they do on its own machine."""
        sys.path[:] = [self._current_folder, *filter(None, sys.path)]
        try:
            server = ForkServerClient("fork")
        finally:
            del sys.path[0]
        server.own(self._folder)
        return server

    def serve(self) -> None:
        """Serve until the session is over, in whatever way; then leave nothing."""
        hello = {
            **host_facts.machine(),
            "folder": str(self._folder),
            "current_folder": self._current_folder,
            "shared_folder": self._shared,
            # As sshd says it: address and port of the client, then its own.
            "address": " ".join(os.environ.get("SSH_CONNECTION", "").split()[2:3]),
            "limits": _why_no_room(self._folder),
        }
        self._send("hello", hello)
        self._wire.call(self._begin)
        self._server.ready.add_done_callback(self._loaded)
        self._server.on_lost(lambda: self._end("its process that starts ranks (fork server) ended"))
        threading.Thread(target=self._await_lifeline, name="ddp-lifeline", daemon=True).start()
        while not self.ended.wait(0.5):
            if not self._server.ready.done():
                self._send("loading", self._server.cpu_s())
            if self._wire.silent_s > self._settings["give_up_after_s"]:
                self._end(f"the notebook was last seen {self._wire.silent_s:.0f} s ago")
        self._send("ending", self._why)
        self._server.close()
        # Where the fork server was killed, what its children have started is left to this process.
        for pid in descendants(os.getpid()):
            send_signal(pid, signal.SIGKILL)
        remove_shared_memory((str(self._folder),), self._began_s)
        self._wire.close(0.5)
        self._held.remove()

    def _begin(self) -> None:
        """On the wire's thread, as all that follows unless it says otherwise."""
        self._wire.watch(self._events, zmq.POLLIN, self._pass_events_on)
        self._look()

    def _await_lifeline(self) -> None:
        """On a thread of its own."""
        with contextlib.suppress(OSError):
            while os.read(0, 1 << 12):
                pass
        self.ended.set()

    def _end(self, why: str) -> None:
        """On any thread."""
        if not self.ended.is_set():
            self._why = why
            self.ended.set()

    def _loaded(self, ready: Any) -> None:
        if ready.exception() is None:
            self._send("ready")

    # -- from the ranks ----------------------------------------------------------------------

    def _pass_events_on(self) -> None:
        messages: list[list[bytes]] = []
        with contextlib.suppress(zmq.Again):
            while len(messages) < _EVENTS_AT_ONCE:
                messages.append(self._events.recv_multipart(zmq.NOBLOCK))
        if messages:
            # First what the ranks have logged by now: an event may say that a cell is over.
            self._mirror.look()
        for source, payload in (each for each in messages if len(each) == 2):
            self._send("event", source.decode("latin-1"), blob=payload)

    def _look(self) -> None:
        self._looks += 1
        if not self._wire.full:
            self._mirror.look_for_files()
            self._mirror.look(all_of_it=self._looks % _COMPARES_EVERY == 0)
        self._wire.call(self._look, after_s=_LOOKS_EACH_S)

    # -- from the notebook -------------------------------------------------------------------

    def _receive(self, kind: str, rest: list[Any], blob: bytes) -> None:
        match kind, rest:
            case "spawn", [tag, spec]:
                self._on_a_thread(self._spawn, tag, spec)
            case "signal", [pid, number]:
                self._server.signal(pid, number)
            case "ask", [tag, name, arguments]:
                self._on_a_thread(self._answer, tag, name, arguments)
            case "open", [number, name]:
                self._connections.open(number, name)
            case (("data" | "shut"), [number]):
                self._connections.take(kind, number, blob)
            case "clock", [near_ns]:
                self._send("clock", near_ns, time.monotonic_ns())

    def _on_a_thread(self, work: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=work, args=arguments, name="ddp-work", daemon=True).start()

    def _here(self, value: Any) -> Any:
        """Return JSON with the paths of the notebook's folder as paths of this one."""
        text = json.dumps(value)
        return json.loads(text.replace(self._settings["folder"], str(self._folder)))

    def _answer(self, tag: int, name: str, arguments: dict[str, Any]) -> None:
        answer = host_facts.QUESTIONS[name](**self._here(arguments))
        self._send("answer", tag, answer)

    def _spawn(self, tag: int, spec: dict[str, Any]) -> None:
        spec = self._here(spec)
        script = re.search(rf"{re.escape(str(self._folder))}/(script-\d+)/", json.dumps(spec))
        if script and not (self._folder / script[1]).is_dir():
            self._make_script_folder(script[1])
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_PASSED_ON)}
        given = {
            name: value
            for name, value in spec["env"].items()
            # A path of the notebook's machine that leads nowhere here, as to its temporary folder.
            if not value.startswith("/") or str(self._folder) in value or Path(value).exists()
        }
        spec = {**spec, "env": {**inherited, **given, HOST_VARIABLE: os.environ[HOST_VARIABLE]}}
        began: list[int] = []

        def begun(pid: int) -> None:
            began.append(pid)
            self._send("spawned", tag, pid)

        try:
            # Who is forked before torch is there would load its own.
            self._server.ready.result()
            self._server.spawn(spec, lambda code: self._exited(began[0], code), begun)
        except Exception as error:  # noqa: BLE001  # it is raised where it was asked for
            self._send("refused", tag, str(error))

    def _make_script_folder(self, name: str) -> None:
        """A script's folder; those of earlier ones are not needed any more."""
        for old in self._folder.glob("script-*"):
            shutil.rmtree(old, ignore_errors=True)
            self._wire.call(partial(self._mirror.forget, old.name))
        (self._folder / name).mkdir(mode=0o700, exist_ok=True)

    def _exited(self, pid: int, code: int) -> None:
        """On the fork server client's thread."""
        shutil.rmtree(self._folder / f"mp-{pid}", ignore_errors=True)
        number = process_id(self._settings["host"], pid)
        for path in (self._folder / "output").glob(f"*-{number}-*"):
            path.unlink(missing_ok=True)
        peak_bytes = self._server.peak_bytes.get(pid, 0)

        def tell() -> None:  # its last words and collectives first
            self._pass_events_on()
            self._mirror.look_for_files()
            self._mirror.look(all_of_it=True)
            self._send("exited", pid, code, peak_bytes)

        self._wire.call(tell)


def _current_folder(settings: dict[str, Any]) -> tuple[str, bool]:
    """Return the folder in which ranks start here, and whether it is the notebook's, shared.

    Raises OSError where the one that is wanted is not there.
    """
    if wanted := settings["wanted_folder"]:
        if not Path(wanted).expanduser().is_dir():
            raise NotADirectoryError(f"there is no folder {wanted}, which --folder names")
        return str(Path(wanted).expanduser()), False
    theirs = settings["current_folder"]
    try:
        status = Path(theirs["path"]).stat()
    except OSError:
        return str(Path.home()), False
    return theirs["path"], [status.st_ino, status.st_mtime_ns] == theirs["state"]


def _why_no_room(folder: Path) -> str:
    """Return why a session's files do not fit there; empty where they do."""
    free_bytes, files = shutil.disk_usage(folder).free, files_left(folder)
    if files is not None and files < _LEAST_FILES:
        return f"{folder.parent} has no room for more files there. Delete what is not needed."
    if free_bytes < _LEAST_FREE_BYTES:
        return (
            f"{folder.parent} has only {format_bytes(free_bytes)} left there. Delete what is not "
            "needed."
        )
    return ""
