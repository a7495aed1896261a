"""The fault lab at work: inject a fault, show what is found, apply the remedy."""

from __future__ import annotations

import contextlib
import difflib
import socket
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from dataclasses import replace as changed
from typing import TYPE_CHECKING

from ddp_notebook.errors import CellFailed, DDPError, SetupFailed, Stuck, UsageMistake
from ddp_notebook.faults import FAULTS, Fault, Kind, TwoHosts, job_path
from ddp_notebook.launch.addresses import free_port
from ddp_notebook.launch.network_namespaces import INTERFACE
from ddp_notebook.model import Diagnosis
from ddp_notebook.session.processes import lab_hosts
from ddp_notebook.session.runs.run import CellRun
from ddp_notebook.session.tools.ddp_construction import WrapOptions

if TYPE_CHECKING:
    from ddp_notebook.session.session import Session

FIRST_NAME = "lab-0"
"""The host with rank 0."""


@dataclass(frozen=True)
class FaultResult:
    """What came of a fault, or of its repair.

    `error` is how the set-up ended, empty when it came to its end. `diagnosis` is what was
    found; None when nothing had to be.
    """

    fault: Fault
    diagnosis: Diagnosis | None
    error: str = ""
    repaired: bool = False


def find(name: str) -> Fault:
    """A fault by its name. Raises UsageMistake."""
    if name in FAULTS:
        return FAULTS[name]
    near = difflib.get_close_matches(name, FAULTS, 3)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise UsageMistake(f"There is no fault {name!r}.{hint} The list: %ddp_fault")


def check(fault: Fault) -> None:
    """Raises UsageMistake when this machine cannot have the fault."""
    if fault.kind is Kind.HOSTS:
        lab_hosts.check()


def inject(
    session: Session, fault: Fault, started: Callable[[CellRun], None] | None = None
) -> FaultResult:
    """Run set-up with the fault in it. Raises UsageMistake when there are too few ranks."""
    world_size = session.record.snapshot.world_size
    if world_size < fault.min_ranks:
        raise UsageMistake(
            f"{fault.name} needs {fault.min_ranks} ranks, and there are {world_size}. "
            f"%ddp_shutdown, then %ddp_init --world-size {fault.min_ranks}"
        )
    return _play(session, fault, True, started)


def repair(
    session: Session, fault: Fault, started: Callable[[CellRun], None] | None = None
) -> FaultResult:
    """Free the ranks, and run the same set-up without the mistake."""
    session.make_ready()
    return _play(session, fault, False, started)


def _play(
    session: Session, fault: Fault, faulty: bool, started: Callable[[CellRun], None] | None
) -> FaultResult:
    play = {
        Kind.SETTINGS: _settings,
        Kind.SCRIPT: _script,
        Kind.HOSTS: _on_two_hosts,
        Kind.MODEL: _model,
    }[fault.kind]
    try:
        diagnosis = play(session, fault, faulty, started)
    except (CellFailed, SetupFailed, Stuck) as error:
        return FaultResult(fault, error.diagnosis, str(error), not faulty)
    return FaultResult(fault, diagnosis, "", not faulty)


def _settings(
    session: Session, fault: Fault, faulty: bool, started: Callable[[CellRun], None] | None
) -> Diagnosis | None:
    options = changed(session.options, settings={}, step=False)
    if not faulty:
        session.set_up(options)
        return None
    with _values(session, fault) as settings:
        session.set_up(changed(options, settings=settings, store=fault.store))
    return None


@contextlib.contextmanager
def _values(session: Session, fault: Fault) -> Iterator[dict[int, dict[str, str]]]:
    """The fault's settings for each rank, with ports that are as they say meanwhile."""
    world_size = session.record.snapshot.world_size
    host = session.options.master_addr
    with socket.create_server((host, 0)) as held:
        made: dict[int, dict[str, str]] = {}
        for place, values in fault.settings.items():
            for rank in range(world_size) if place < 0 else (place,):
                known = {
                    "held_port": held.getsockname()[1],
                    "free_port": free_port(host),
                    "world_size": world_size,
                }
                filled = {name: text.format(**known) for name, text in values.items()}
                made.setdefault(rank, {}).update(filled)
        yield made


def _script(
    session: Session, fault: Fault, faulty: bool, started: Callable[[CellRun], None] | None
) -> Diagnosis | None:
    everyone = range(session.record.snapshot.world_size)
    result = session.run_script(
        str(job_path(fault.job)),
        store=fault.store,
        settings={rank: {"DDP_FAULT": str(int(faulty))} for rank in everyone},
        started=started,
    )
    result.raise_for_error()
    if result.diagnosis is not None:
        return result.diagnosis
    return session.seen_late if faulty and fault.passes else None


def _on_two_hosts(
    session: Session, fault: Fault, faulty: bool, started: Callable[[CellRun], None] | None
) -> Diagnosis | None:
    hosts = fault.hosts if faulty else TwoHosts()
    port = free_port(session.options.master_addr)
    placed = session.open_lab((FIRST_NAME, hosts.name), hosts.drops, port)
    settings = {rank: {"GLOO_SOCKET_IFNAME": INTERFACE} for rank in placed.hosts}
    for place, values in fault.settings.items() if faulty else ():
        for rank in placed.hosts if place < 0 else (place,):
            settings[rank].update(values)
    result = session.run_script(
        str(job_path(fault.job)),
        store=fault.store,
        settings=settings,
        started=started,
        placed=placed,
    )
    result.raise_for_error()
    return result.diagnosis


def _model(
    session: Session, fault: Fault, faulty: bool, started: Callable[[CellRun], None] | None
) -> Diagnosis | None:
    if not session.ready:
        session.set_up(changed(session.options, settings={}, step=False))
    session.run_cell(fault.model_source(faulty=faulty), started=started).raise_for_error()
    wrapping = session.wrap("model", WrapOptions())
    if wrapping.diagnosis is not None and wrapping.diagnosis.findings:
        if not faulty:
            raise DDPError(wrapping.diagnosis.headline)
        return wrapping.diagnosis
    return None


def names() -> list[str]:
    """The faults, as a user types them."""
    return list(FAULTS)


def listing() -> str:
    """All faults, one a line."""
    width = max(map(len, FAULTS))
    lines = [f"{fault.name:<{width}}  {fault.title}" for fault in FAULTS.values()]
    return "\n".join(["The fault lab: %ddp_fault NAME, then %ddp_fault --repair", "", *lines])


def story(fault: Fault, *, whole: bool = False) -> str:
    """What a fault is about; with `whole`, also what it changes."""
    lines = [f"{fault.name}: {fault.title}", *textwrap.wrap(fault.lesson, 96)]
    if fault.simulated:
        lines += textwrap.wrap(f"(Simulated: {fault.simulated}.)", 96)
    if whole and fault.kind is Kind.HOSTS:
        lines += _of_hosts(fault.hosts)
    if whole and fault.kind in (Kind.SETTINGS, Kind.HOSTS):
        for place, values in fault.settings.items():
            where = "every rank" if place < 0 else f"rank {place}"
            lines += [f"  {where}: {name}={value}" for name, value in values.items()]
    if whole and fault.kind in (Kind.SCRIPT, Kind.HOSTS):
        lines += ["", job_path(fault.job).read_text("utf-8")]
    if whole and fault.kind is Kind.MODEL:
        lines += ["", fault.model_source(faulty=True).strip()]
    return "\n".join(lines)


def _of_hosts(hosts: TwoHosts) -> list[str]:
    """What `story` says of two hosts."""
    lines = [f"  host {FIRST_NAME}: all ranks but 1", f"  host {hosts.name}: rank 1"]
    dropped = {"store": "TCP to the store's port", "ranks": "TCP to any port but the store's"}
    if hosts.drops:
        lines.append(f"  firewall on {FIRST_NAME}: drops {dropped[hosts.drops]}")
    return lines
