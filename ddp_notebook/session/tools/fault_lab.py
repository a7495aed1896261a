"""The fault lab: injects a fault, shows what is found, applies the remedy."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import socket
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ddp_notebook.errors import CellFailed, DDPError, SetupFailed, Stuck, UsageMistake
from ddp_notebook.faults import FAULTS, Fault, Kind, TwoHosts
from ddp_notebook.launch import lab_hosts
from ddp_notebook.launch.addresses import free_port
from ddp_notebook.model import Diagnosis
from ddp_notebook.session.runs.endings import CellResult
from ddp_notebook.session.runs.run import CellRun
from ddp_notebook.session.tools.ddp_construction import WrapOptions

if TYPE_CHECKING:
    from ddp_notebook.launch.lab_hosts import Placed
    from ddp_notebook.session.options import Settings
    from ddp_notebook.session.pool import RankPool
    from ddp_notebook.session.record import Record
    from ddp_notebook.session.runs.registry import RunRegistry
    from ddp_notebook.session.set_up import SetUp
    from ddp_notebook.session.tools.ddp_construction import DdpConstruction

FIRST_NAME = "lab-0"
"""The host with rank 0."""


@dataclass(frozen=True)
class FaultResult:
    """The outcome of a fault, or of its repair.

    `error` is how setup failed, empty when it succeeded. There is no `diagnosis` if no finding was
    expected. `replaced` says which processes were replaced first.
    """

    fault: Fault
    diagnosis: Diagnosis | None
    error: str = ""
    repaired: bool = False
    replaced: tuple[str, ...] = ()


Started = Callable[[CellRun], None] | None
"""Called with a run once it has begun."""


@dataclass(eq=False)
class FaultLab:
    """Injects faults into the setup of a session's ranks, and repairs them."""

    _record: Record
    _pool: RankPool
    _set_up: SetUp
    _runs: RunRegistry
    _construction: DdpConstruction
    _last: Fault | None = None
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Of folders, which go away with the session's."""

    def fault(self, name: str, started: Started = None) -> FaultResult:
        """Inject a fault of the lab into a setup. Raises UsageMistake."""
        self._pool.need("%ddp_fault")
        fault = find(name)
        if fault.kind is Kind.HOSTS:
            check_hosts()
        self._set_up.make_ready()
        if self._world_size < fault.min_ranks:
            raise UsageMistake(
                f"{fault.name} needs {fault.min_ranks} ranks, and there are {self._world_size}. "
                f"Start more: %ddp_init --world-size {fault.min_ranks} --replace"
            )
        result = self._run(fault, True, started)
        self._last = fault
        return result

    def repair(self, started: Started = None) -> FaultResult:
        """Apply the remedy of the last fault: setup succeeds. Raises UsageMistake."""
        self._pool.need("%ddp_fault")
        if self._last is None:
            raise UsageMistake("There is nothing to repair: inject a fault first, %ddp_fault NAME")
        self._set_up.make_ready()
        return self._run(self._last, False, started)

    @property
    def _world_size(self) -> int:
        return self._record.snapshot.world_size

    def _run(self, fault: Fault, faulty: bool, started: Started) -> FaultResult:
        """Run setup, a script or a cell with the fault in it, or without it."""
        diagnosis, failed, replaced = None, "", self._set_up.replaced
        try:
            match fault.kind:
                case Kind.SETTINGS:
                    self._settings(fault, faulty)
                case Kind.HOSTS:
                    diagnosis = self._on_two_hosts(fault, faulty, started)
                case Kind.MODEL:
                    diagnosis = self._model(fault, faulty, started)
                case Kind.SCRIPT:
                    # A file of an earlier run, at the same path, would be another fault.
                    number = next(self._numbers)
                    folder = self._pool.need("%ddp_fault").folder / f"fault-{number}"
                    with contextlib.suppress(OSError):  # a session folder that is gone: `run` says
                        folder.mkdir(mode=0o700)
                    values = {"DDP_FAULT": str(int(faulty)), "DDP_FAULT_FOLDER": str(folder)}
                    settings = dict.fromkeys(range(self._world_size), values)
                    diagnosis = self._run_script(fault, settings, started).diagnosis
                    if diagnosis is None and faulty and fault.passes:
                        diagnosis = self._runs.seen_late
        except (CellFailed, SetupFailed, Stuck) as error:
            diagnosis, failed = error.diagnosis, str(error)
        return FaultResult(fault, diagnosis, failed, not faulty, replaced)

    def _settings(self, fault: Fault, faulty: bool) -> None:
        options = self._set_up.as_before()
        if not faulty:
            self._set_up.set_up(options)
            return
        settings: dict[int, dict[str, str]] = {}
        if options.hosts:
            raise UsageMistake(
                "The lab's mistakes of setup are tried on one machine. Type: %ddp_init --replace"
            )
        # Held until setup has failed: a port that is only known to be taken may be free by then.
        with socket.create_server((options.master_addr, 0)) as taken:
            for index, values in fault.settings.items():
                for rank in range(options.world_size) if index < 0 else (index,):
                    known = {
                        "held_port": taken.getsockname()[1],
                        "free_port": free_port(options.master_addr),
                        "world_size": options.world_size,
                    }
                    filled = {name: text.format(**known) for name, text in values.items()}
                    settings.setdefault(rank, {}).update(filled)
            self._set_up.set_up(replace(options, settings=settings, store=fault.store))

    def _on_two_hosts(self, fault: Fault, faulty: bool, started: Started) -> Diagnosis | None:
        processes = self._pool.need("%ddp_fault")
        hosts = fault.hosts if faulty else TwoHosts()
        port = free_port(processes.options.master_addr)
        placed = processes.open_lab((FIRST_NAME, hosts.name), hosts.drops, port)
        settings = {rank: {"GLOO_SOCKET_IFNAME": lab_hosts.INTERFACE} for rank in placed.hosts}
        for index, values in fault.settings.items() if faulty else ():
            for rank in placed.hosts if index < 0 else (index,):
                settings[rank].update(values)
        return self._run_script(fault, settings, started, placed).diagnosis

    def _run_script(
        self, fault: Fault, settings: Settings, started: Started, placed: Placed | None = None
    ) -> CellResult:
        """The result of the fault's script. Raises its error."""
        result = self._runs.run_script(
            str(fault.script),
            store=fault.store,
            settings=settings,
            started=started,
            placed=placed,
        )
        result.raise_for_error()
        return result

    def _model(self, fault: Fault, faulty: bool, started: Started) -> Diagnosis | None:
        if not self._set_up.complete:
            self._set_up.set_up(self._set_up.as_before())
        made = fault.model_source(faulty=faulty)
        self._runs.run_cell(made, started=started).raise_for_error()
        wrapping = self._construction.wrap("model", WrapOptions())
        if wrapping.diagnosis is not None and wrapping.diagnosis.findings:
            if not faulty:
                raise DDPError(wrapping.diagnosis.headline)
            return wrapping.diagnosis
        return None


def find(name: str) -> Fault:
    """A fault by its name. Raises UsageMistake."""
    if name in FAULTS:
        return FAULTS[name]
    near = difflib.get_close_matches(name, FAULTS, 3)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise UsageMistake(f"There is no fault {name!r}.{hint} The list: %ddp_fault")


def check_hosts() -> None:
    """Raises UsageMistake where the lab cannot have a second host. Changes nothing."""
    if why := lab_hosts.why_not():
        raise UsageMistake(
            "This fault needs a second host, which the lab makes of network namespaces, and here "
            f"that does not work: {why}. Start Jupyter as root on Linux, with the capability "
            "CAP_SYS_ADMIN (docker run --privileged), or try another fault: %ddp_fault"
        )


def names() -> list[str]:
    """The faults' names, as a user types them."""
    return list(FAULTS)


def listing() -> str:
    """All faults, one a line."""
    width = max(map(len, FAULTS))
    lines = [f"{fault.name:<{width}}  {fault.title}" for fault in FAULTS.values()]
    return "\n".join(["The fault lab: %ddp_fault NAME, then %ddp_fault --repair", "", *lines])


def story(fault: Fault, *, whole: bool = False) -> str:
    """Return what a fault is about; with `whole`, also what it changes."""
    lines = [f"{fault.name}: {fault.title}", *textwrap.wrap(fault.lesson, 96)]
    if fault.simulated:
        lines += textwrap.wrap(f"(Simulated: {fault.simulated}.)", 96)
    if not whole:
        return "\n".join(lines)
    if fault.kind is Kind.HOSTS:
        lines += [f"  host {FIRST_NAME}: all ranks but 1", f"  host {fault.hosts.name}: rank 1"]
        dropped = {"store": "TCP to the store's port", "ranks": "TCP to any port but the store's"}
        if drops := fault.hosts.drops:
            lines.append(f"  firewall on {FIRST_NAME}: drops {dropped[drops]}")
    for index, values in fault.settings.items():
        where = "every rank" if index < 0 else f"rank {index}"
        lines += [f"  {where}: {name}={value}" for name, value in values.items()]
    if fault.kind in (Kind.SCRIPT, Kind.HOSTS):
        lines += ["", fault.script.read_text("utf-8")]
    if fault.kind is Kind.MODEL:
        lines += ["", fault.model_source(faulty=True).strip()]
    return "\n".join(lines)
