"""The session's client of several hosts: a fork server on each, as one.

It has the methods of `client.ForkServerClient`. Host 0 is the notebook's own machine, whose fork
server starts the controller; ranks and stores go to the host that their `spec` names. What ranks
there put into the session's folder appears in the folder here, so who reads it, connects to a
socket in it or receives events need not know of hosts.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, InvalidStateError, wait
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import zmq

from ddp_notebook.errors import DDPError, SessionLost, SetupFailed
from ddp_notebook.launch import twin
from ddp_notebook.launch.client import ExitHandler, ForkServerClient, result_while_busy
from ddp_notebook.launch.placement import Hello, HostSpec
from ddp_notebook.launch.process_ids import host_of, pid_of, process_id
from ddp_notebook.launch.ssh_hosts import Ssh, tunneled
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.launch.wire import SILENT_S, Wire, relay_address

T = TypeVar("T")
_CONNECTION = "security/ipcontroller-ddp-{side}.json"
"""The controller's files, for clients and for engines."""
_SPAWNS_WITHIN_S, _ANSWERS_WITHIN_S, _SAYS_HELLO_WITHIN_S = 60.0, 2.0, 10.0
_PORTS_TRIED = 3
_CLOCK_EACH_S, _CLOCKS_AT_FIRST, _CLOCKS_KEPT = 10.0, 3, 8
_LONGEST_TEXT = 4096
_KEPT_HERE = ("IPP_CONNECTION_INFO", "SLURM_", "OMPI_", "PMIX_", "SSH_", "JPY_")
"""How the names of variables begin that say where the notebook was started; the first one holds the
controller's address, and would outrank its file."""
_at_start = dict(os.environ)
with contextlib.suppress(OSError):  # as this process began, which is earlier still; Linux
    _at_start = dict(
        line.split("=", 1)
        for line in os.fsdecode(Path("/proc/self/environ").read_bytes()).split("\0")
        if "=" in line
    )


@dataclass
class _Child:
    """A process on a far host."""

    on_exit: ExitHandler
    log: Path
    asked_at: Path | None
    """Its control socket, as the session's folder has it."""


class _FarHost:
    """One host beside the notebook's own: its ssh, the wire to its agent, and its processes."""

    def __init__(
        self,
        number: int,
        name: str,
        folder: Path,
        settings: Mapping[str, Any],
        seen: Callable[[str], None],
        peak_bytes: dict[int, int],
    ) -> None:
        self.name = name
        self.hello: Future[Hello] = Future()
        self.loaded: Future[None] = Future()
        """Done when it has torch loaded."""
        self.loading_cpu_s = 0.0
        """The CPU time that its fork server has used so far to load torch."""
        self.lost = ""
        """Why it can start nothing any more; empty while it can."""
        self._number = number
        self._folder = folder
        self._seen = seen
        self._peak_bytes = peak_bytes
        self._closing = False
        self._lock = threading.Lock()
        self._tags = itertools.count()
        self._asked: dict[int, Future[Any]] = {}
        """Its open questions, spawns too."""
        self._children: dict[int, _Child] = {}
        self._ended: dict[int, int] = {}
        """The exit codes of processes whose handlers are not known yet."""
        self._clocks: deque[tuple[int, int]] = deque(maxlen=_CLOCKS_KEPT)
        """The last messages there and back: how long each took, and the offset by it."""
        self._facts: dict[str, Any] = {}
        self._events: Any = None
        self._context: Any = zmq.Context()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """Calls for the thread that may wait for this host."""
        key = secrets.token_bytes(32)
        name_here = f"ddp-{secrets.token_hex(8)}"
        self._settings = {
            **settings,
            "host": number,
            "key": key.hex(),
            "near": f"{name_here}.0",
            "name": f"ddp-{secrets.token_hex(8)}",
            "folder": str(folder),
        }
        self._give_up_after_s = float(settings["give_up_after_s"])
        self._connections = twin.Connections(lambda: self._wire, folder, lambda: None)
        connection = json.loads((folder / _CONNECTION.format(side="client")).read_text())
        self._wire = Wire(relay_address(connection), key, name_here, "", self._receive, near=True)
        threading.Thread(target=self._run_work, name="ddp-host", daemon=True).start()
        self._tries = 0
        self._start_ssh()
        self._wire.call(self._look_after, after_s=SILENT_S)

    def _start_ssh(self) -> None:
        """Start it, or start it again with other ports there. Raises UsageMistake."""
        self._tries += 1
        connection = json.loads((self._folder / _CONNECTION.format(side="engine")).read_text())
        there, forwards = tunneled(connection)
        settings = {**self._settings, "connection": there}
        python = self._settings["python"]
        self.ssh = Ssh(self.name, python, forwards, settings, self._told, self._ssh_ended)

    # -- until it has said hello -----------------------------------------------------------

    def _told(self, said: Mapping[str, Any]) -> None:
        """The agent has written a line, on the way to its start."""
        try:
            self.ssh.check(said)
        except SetupFailed as failure:
            self._fail(failure)
        if "agent" in said:
            self._seen("agent")
            limit_s = scaled_for_load(_SAYS_HELLO_WITHIN_S)
            self._wire.call(self._expect_hello, after_s=limit_s)
        elif "python" in said:
            self._seen("reached")

    def _expect_hello(self) -> None:
        if not self._facts:
            self._fail(
                SetupFailed(
                    f"Host {self.name}: its agent runs, and cannot reach the ipyparallel "
                    "controller through ssh. Look there at sshd_config (AllowTcpForwarding, "
                    "PermitListen), and at a firewall of its loopback interface."
                )
            )

    def _fail(self, why: DDPError) -> None:
        for future in (self.hello, self.loaded):
            with contextlib.suppress(InvalidStateError):
                future.set_exception(why)

    def _ssh_ended(self) -> None:
        if self._closing:
            return
        if self._facts:
            self.lose(f"its ssh ended: {self.ssh.last or 'it said nothing'}")
        elif self.ssh.port_was_taken and self._tries < _PORTS_TRIED:
            self._start_ssh()
        else:
            self._fail(SetupFailed(self.ssh.why_ended()))

    def _take_hello(self, facts: Mapping[str, Any]) -> None:
        """Believe what has the right form. Raises LookupError, ValueError, TypeError."""
        kinds = {"str": str, "int": int, "bool": bool}
        known: dict[str, Any] = {"clock_offset_ns": 0}
        for field in fields(Hello):
            if field.name == "gpus":
                known["gpus"] = tuple(str(gpu)[:_LONGEST_TEXT] for gpu in facts["gpus"][:1024])
            elif field.name not in known:
                kind = kinds[str(field.type)]
                value = kind(facts[field.name] or kind())
                known[field.name] = value[:_LONGEST_TEXT] if isinstance(value, str) else value
        self._facts = known
        try:
            self.ssh.check({"product": known["product"]})
        except SetupFailed as failure:
            self._fail(failure)
        self._ask_clock()

    def said(self) -> Hello:
        """Return what it has said of itself, with the offset of its clock as known by now."""
        return replace(self.hello.result(0), clock_offset_ns=min(self._clocks)[1])

    def _ask_clock(self) -> None:
        self._wire.send("clock", time.monotonic_ns())

    def _take_clock(self, sent_ns: int, there_ns: int) -> None:
        took_ns = time.monotonic_ns() - sent_ns
        # Of the last few the quickest counts: its halves are the most alike.
        self._clocks.append((took_ns, sent_ns + took_ns // 2 - there_ns))
        if self.hello.done():
            self._wire.call(self._ask_clock, after_s=_CLOCK_EACH_S)
        elif len(self._clocks) < _CLOCKS_AT_FIRST:
            self._ask_clock()
        else:
            with contextlib.suppress(InvalidStateError):
                self.hello.set_result(Hello(**self._facts))
            self._wire.call(self._ask_clock, after_s=_CLOCK_EACH_S)

    # -- what it tells, on the wire's thread -----------------------------------------------

    def _receive(self, kind: str, rest: list[Any], blob: bytes) -> None:
        match kind, rest:
            case "event", [source]:
                self._pass_event_on(source, blob)
            case "part", [name, begin]:
                twin.write_part(self._folder, name, begin, blob)
            case (("data" | "shut"), [int(number)]):
                self._connections.take(kind, number, blob)
            case (("spawned" | "answer"), [tag, value]):
                self._asked.pop(tag).set_result(value)
            case "refused", [tag, why]:
                error = OSError(f"host {self.name}: {str(why)[:_LONGEST_TEXT]}")
                self._asked.pop(tag).set_exception(error)
            case "exited", [int(pid), int(code), int(peak_bytes)]:
                self._peak_bytes[process_id(self._number, pid)] = peak_bytes
                self._work.put(lambda: self._exited(pid, code))
            case "loading", [float(cpu_s) | int(cpu_s)]:
                if not self.loading_cpu_s:
                    self._seen("loads torch")
                self.loading_cpu_s = float(cpu_s)
            case "ready", []:
                self._seen("ready")
                with contextlib.suppress(InvalidStateError):
                    self.loaded.set_result(None)
            case "clock", [int(sent_ns), int(there_ns)]:
                self._take_clock(sent_ns, there_ns)
            case _:
                self._receive_seldom(kind, rest)

    def _receive_seldom(self, kind: str, rest: list[Any]) -> None:
        match kind, rest:
            case "hello", [facts]:
                self._take_hello(facts)
            case "ending", [why]:
                self.lose(str(why)[:_LONGEST_TEXT])

    def _pass_event_on(self, source: str, payload: bytes) -> None:
        if self._events is None:
            self._events = self._context.socket(zmq.PUSH)
            self._events.sndhwm = 0
            self._events.connect(f"ipc://{self._folder}/events.sock")
        self._events.send_multipart([source.encode("latin-1"), payload], zmq.NOBLOCK)

    # -- its processes -----------------------------------------------------------------------

    def ask(self, *message: Any, within_s: float) -> Any:
        """Send what the host is to answer; return the answer. Raises TimeoutError, OSError."""
        kind, *rest = message
        tag, future = next(self._tags), Future[Any]()
        with self._lock:  # either this sees that it is lost, or `lose` sees the future
            if self.lost:
                raise OSError(f"host {self.name}: {self.lost}")
            self._asked[tag] = future
        try:
            self._wire.send(kind, tag, *rest)
            return future.result(within_s)
        finally:
            self._asked.pop(tag, None)

    def spawn(
        self, spec: Mapping[str, Any], on_exit: ExitHandler, begun: Callable[[int], None]
    ) -> int:
        """Start a child there; as `ForkServerClient.spawn`."""
        environment = {
            name: value
            for name, value in spec["env"].items()
            # Only what differs from the machine's own: that of here is none of there.
            if value != _at_start.get(name) and not name.startswith(_KEPT_HERE)
        }
        asked_at = Path(spec["asked_at"]) if spec.get("asked_at") else None
        child = _Child(on_exit, Path(spec["log"]), asked_at)
        if asked_at is not None:
            # On its thread, which does this before it sends what follows.
            self._wire.call(lambda: self._connections.listen(asked_at))
        try:
            there = {**spec, "env": environment}
            pid = int(self.ask("spawn", there, within_s=scaled_for_load(_SPAWNS_WITHIN_S)))
        except TimeoutError:
            raise OSError(f"host {self.name} has not answered for {_SPAWNS_WITHIN_S:g} s") from None
        number = process_id(self._number, pid)
        begun(number)
        with self._lock:
            code = self._ended.pop(pid, -signal.SIGKILL if self.lost else None)
            if code is None:
                self._children[pid] = child
        if code is not None:
            self._end_child(child, code)
        return number

    def _exited(self, pid: int, code: int) -> None:
        with self._lock:
            child = self._children.pop(pid, None)
            if child is None:
                self._ended[pid] = code
        if child is not None:
            self._end_child(child, code)

    def _end_child(self, child: _Child, code: int) -> None:
        if child.asked_at is not None:
            path = child.asked_at
            self._wire.call(lambda: self._connections.close_listener(path))
        child.on_exit(code)

    def signal(self, pid: int, number: int) -> None:
        """Signal a child there."""
        self._wire.send("signal", pid, number)

    def _run_work(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    # -- its end -----------------------------------------------------------------------------

    @property
    def silent_s(self) -> float:
        """The time since it was last seen."""
        return self._wire.silent_s

    def _look_after(self) -> None:
        if self.silent_s > self._give_up_after_s:
            self.lose(f"it was last seen {self.silent_s:.0f} s ago")
            self.ssh.hang_up()
        else:
            self._wire.call(self._look_after, after_s=SILENT_S)

    def lose(self, why: str) -> None:
        """It can start nothing any more, and its processes have ended."""
        with self._lock:
            if self.lost or self._closing:
                return
            self.lost = why
            asked, self._asked = self._asked, {}
            children, self._children = self._children, {}
        error = f"Host {self.name} was lost: {why}."
        self._fail(SessionLost(f"{error} Start again: %ddp_init"))
        for future in asked.values():
            with contextlib.suppress(InvalidStateError):
                future.set_exception(OSError(error))
        for child in children.values():
            with contextlib.suppress(OSError), child.log.open("a") as log:
                log.write(f"{error}\n")  # the last words of its ranks
            self._work.put(lambda child=child: self._end_child(child, -signal.SIGKILL))  # type: ignore[misc]

    def begin_to_close(self) -> None:
        """End everything there without telling its callers."""
        with self._lock:
            self._closing = True
            self._children.clear()
            asked, self._asked = self._asked, {}
        for future in asked.values():
            with contextlib.suppress(InvalidStateError):
                future.set_exception(SessionLost("The ranks were shut down meanwhile."))
        self.ssh.hang_up()

    def close(self, timeout_s: float) -> None:
        """Return when it has ended."""
        self.ssh.wait(timeout_s)
        self._wire.call(self._connections.close)
        self._wire.close(0.0)
        self._work.put(None)
        self._context.destroy(0)


class HostsClient:
    """The hosts of one session; `local` is the notebook's own fork server. Thread-safe."""

    def __init__(
        self,
        local: ForkServerClient,
        hosts: Sequence[HostSpec],
        *,
        python: str = "",
        folder: str = "",
        give_up_after_s: float = 120.0,
    ) -> None:
        self.local = local
        self.hosts = tuple(hosts)
        """Hosts 1, 2, ... of the session."""
        self.ready: Future[Mapping[str, Any]] = Future()
        """Done when every host has torch loaded."""
        self._settings = {
            "python": python,
            "wanted_folder": folder,
            "give_up_after_s": give_up_after_s,
        }
        self._far: dict[int, _FarHost] = {}
        self._far_peak_bytes: dict[int, int] = {}

    # -- as ForkServerClient -------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The notebook's own fork server."""
        return self.local.pid

    @property
    def alive(self) -> bool:
        """False once the notebook's own fork server is gone, or every host is."""
        far = self._far.values()
        return self.local.alive and not (far and all(host.lost for host in far))

    @property
    def peak_bytes(self) -> dict[int, int]:
        """The peak memory of processes that ended, on every host, by their numbers."""
        return {**self.local.peak_bytes, **self._far_peak_bytes}

    def equals_a_new_one(self) -> bool:
        """As ForkServerClient's, for this machine."""
        return self.local.equals_a_new_one()

    def spawn(
        self,
        spec: Mapping[str, Any],
        on_exit: ExitHandler,
        begun: Callable[[int], None] = lambda pid: None,
    ) -> int:
        """Start a child on host ``spec["host"]`` (0 or absent: here); return its number.

        `begun` and `on_exit` as in ForkServerClient.spawn, with `process_ids.process_id`. A child
        that is asked at a control socket names it: ``spec["asked_at"]``. Raises SessionLost and
        OSError, with the host's name.
        """
        host = spec.get("host", 0)
        if not host:
            return self.local.spawn(spec, on_exit, begun)
        if host not in self._far:
            raise SessionLost("The hosts were shut down. Start again: %ddp_init")
        return self._far[host].spawn(spec, on_exit, begun)

    def signal(self, pid: int, number: int) -> None:
        """Signal a child, on the host that its number names."""
        if host := self._far.get(host_of(pid)):
            host.signal(pid_of(pid), number)
        elif not host_of(pid):
            self.local.signal(pid, number)

    def result_of(self, future: Future[T], silent_s: float) -> T:
        """Wait for what a host answers. Raises TimeoutError, but not while it makes progress."""
        return result_while_busy(
            future,
            lambda: sum(host.loading_cpu_s for host in self._far.values()),
            scaled_for_load(silent_s),
        )

    def own(self, folder: Path) -> None:
        """Have this folder removed here when this process is gone."""
        self.local.own(folder)

    def on_lost(self, handler: Callable[[], None]) -> None:
        """Call `handler` when the notebook's own fork server is gone."""
        self.local.on_lost(handler)

    def reset(self, timeout_s: float = 5) -> bool:
        """End all children and all agents; `local` stays. False when it does not answer."""
        self._close_far()
        return self.local.reset(timeout_s)

    def wake(self) -> None:
        """Resume the notebook's own fork server if something stopped it."""
        self.local.wake()

    def close(self, timeout_s: float = 5) -> None:
        """End everything on every host; return when it is gone."""
        self._close_far()
        self.local.close(timeout_s)

    def question(self, host: int, name: str, **arguments: Any) -> Any:
        """Ask a host one of `host_facts.QUESTIONS`; None where it does not answer in 2 s.

        At once while it is silent.
        """
        if not host:
            return self.local.question(host, name, **arguments)
        far = self._far.get(host)
        if far is None or far.silent_s > SILENT_S:
            return None
        try:
            return far.ask("ask", name, arguments, within_s=_ANSWERS_WITHIN_S)
        except (TimeoutError, OSError, SessionLost):
            return None

    # -- hosts -----------------------------------------------------------------------------

    def reach(self, folder: Path, seen: Callable[[int, str], None], timeout_s: float) -> None:
        """Start every host's agent and wait until all have said hello.

        `folder` is the session's; its controller runs and has written its files. `seen` gets a host
        and what it is at (``reached``, ``agent``, ``torch 40 %``), from any thread, also after the
        return. Raises SetupFailed with the host, the cause and the remedy; then nothing is left.
        """
        current = Path.cwd()
        status = current.stat()
        settings = {
            **self._settings,
            "current_folder": {
                "path": str(current),
                "state": [status.st_ino, status.st_mtime_ns],
            },
        }

        try:
            for number, spec in enumerate(self.hosts, 1):
                self._far[number] = _FarHost(
                    number, spec.name, folder, settings, partial(seen, number), self._far_peak_bytes
                )
            hellos = {host.hello: host for host in self._far.values()}
            done, missing = wait(hellos, scaled_for_load(timeout_s), FIRST_EXCEPTION)
            for hello in done:
                hello.result()
            if missing:
                names = ", ".join(hellos[hello].name for hello in missing)
                raise SetupFailed(
                    f"No agent has answered from {names} within {timeout_s:g} s. Is the link slow, "
                    "or a disk there? Try again, with more time: --timeout 120"
                )
        except BaseException:
            self._close_far()
            raise
        for host in self._far.values():
            host.loaded.add_done_callback(self._host_loaded)

    def _host_loaded(self, loaded: Future[None]) -> None:
        with contextlib.suppress(InvalidStateError):
            if error := loaded.exception():
                self.ready.set_exception(error)
            elif all(host.loaded.done() for host in self._far.values()):
                self.ready.set_result({})

    def hello(self, host: int) -> Hello:
        """Return what a host has said of itself. After `reach` only."""
        return self._far[host].said()

    def silent_s(self, host: int) -> float:
        """Return the time since a host was last seen; 0 for the notebook's own."""
        far = self._far.get(host)
        return far.silent_s if far is not None else 0.0

    def _close_far(self, timeout_s: float = 8.0) -> None:
        far, self._far = self._far, {}
        for host in far.values():  # all begin before one is waited for
            host.begin_to_close()
        for host in far.values():
            host.close(timeout_s)


ProcessStarter = ForkServerClient | HostsClient
"""The starter of a session's processes."""
