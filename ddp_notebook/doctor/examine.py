"""`examine`: makes all checks in order, each with the facts that it needs."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Any, TypeAlias

import psutil

from ddp_notebook.doctor import facts, gpus, machine, network, software, variables
from ddp_notebook.launch import devices
from ddp_notebook.launch.client import can_fork
from ddp_notebook.launch.out_of_memory import container_memory
from ddp_notebook.model.doctor import Check, DoctorReport
from ddp_notebook.session.options import InitOptions, check_world_size, cores

_NEEDED_MODULES = ("torch", "numpy", "ipyparallel", "ipykernel", "IPython", "zmq", "psutil")


Look: TypeAlias = Callable[[], Check | Iterable[Check]]
"""Makes one check or several, and gets the facts for it only when called."""


def examine(
    world_size: int,
    *,
    backend: str = "auto",
    master_port: int = 0,
    threads: int = 0,
    rank_facts: Mapping[int, Mapping[str, Any]] | None = None,
    command: str = "%ddp_doctor",
) -> DoctorReport:
    """Check whether `world_size` ranks can work here; starts none, changes nothing.

    The arguments are those of `%ddp_init`; `command` is what the user typed, for messages.
    `rank_facts` is what `rank.inspect.facts.gather` returned on running ranks; without it a fresh
    Python is asked about torch, which takes seconds. Raises UsageMistake.
    """
    check_world_size(world_size, command)
    InitOptions(  # which checks the other arguments
        world_size=world_size, backend=backend, master_port=master_port, threads_per_rank=threads
    )
    torch = rank_facts[min(rank_facts)] if rank_facts else facts.torch_facts()
    environment = dict(os.environ)
    gpus_here = devices.gpus()
    pool = (
        devices.visible_gpus()
        if "CUDA_VISIBLE_DEVICES" in environment
        else [gpu.index for gpu in gpus_here]
    )
    on_gpus = world_size <= len(pool)
    nccl_wanted = backend == "nccl" or (backend == "auto" and on_gpus)
    looks = (
        *_at_variables(environment),
        *_at_software(torch, rank_facts or {}, backend, nccl_wanted),
        *_at_devices(world_size, backend, gpus_here, pool, torch),
        *((("GPUs", partial(gpus.check_gpus, gpus_here, environment)),) if on_gpus else ()),
        *_at_network(world_size, master_port, environment, nccl_wanted),
        *_at_memory(world_size, nccl_wanted),
        *_at_processes(world_size, threads, environment.get("OMP_NUM_THREADS")),
        *_at_surroundings(),
    )
    checks = tuple(check for name, look in looks for check in _safely(name, look))
    return DoctorReport(checks, world_size, backend)


def _safely(name: str, look: Look) -> Iterator[Check]:
    """The checks that `look` makes; a warning when the system does not let us look."""
    try:
        checks = look()
        yield from (checks,) if isinstance(checks, Check) else checks
    except (psutil.Error, OSError, ValueError) as error:
        remedy = "%ddp_init works without this check. Check it by hand."
        yield Check.warning(name, f"could not be checked: {error}", remedy)


def _at_variables(environment: Mapping[str, str]) -> Iterator[tuple[str, Look]]:
    yield "rendezvous variables", partial(variables.check_rendezvous, environment)
    yield "other variables", partial(variables.check_known_trouble, environment)


def _at_software(
    torch: software.Facts,
    rank_facts: Mapping[int, software.Facts],
    backend: str,
    on_gpus: bool,
) -> Iterator[tuple[str, Look]]:
    yield "Python", lambda: software.check_version("python", platform.python_version())
    yield "torch", partial(software.check_torch, torch)
    if torch.get("torch") and torch.get("distributed"):
        yield "backend", partial(software.check_backend, torch, backend, on_gpus)
    for name in ("ipyparallel", "ipykernel"):
        yield name, partial(software.check_version, name, facts.installed_version(name))
    yield "ranks", partial(software.check_ranks, rank_facts)
    yield (
        "file names",
        lambda: software.check_shadowing(facts.modules_of(Path.cwd()), _NEEDED_MODULES),
    )


def _at_devices(
    world_size: int,
    backend: str,
    gpus_here: Sequence[devices.Gpu],
    pool: Sequence[str],
    torch: software.Facts,
) -> Iterator[tuple[str, Look]]:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    yield (
        "CUDA_VISIBLE_DEVICES",
        partial(gpus.check_visible_devices, chosen, gpus_here, torch.get("devices")),
    )
    yield "devices", partial(gpus.check_devices, world_size, backend, pool, torch)


def _at_network(
    world_size: int, master_port: int, environment: Mapping[str, str], nccl_wanted: bool
) -> Iterator[tuple[str, Look]]:
    sockets = facts.connections()
    ports = facts.local_ports(sockets)
    port = master_port or variables.port_of(environment)
    if port:
        asked_by = "--master-port" if master_port else "MASTER_PORT"
        yield (
            f"port {port}",
            lambda: network.check_port(
                port, asked_by, facts.try_port(port), facts.holders_of(port, sockets), ports
            ),
        )
    if ports is not None:
        yield "free ports", partial(network.check_ports, ports, world_size)
    yield "loopback", lambda: network.check_loopback(facts.try_loopback())
    interfaces = facts.interfaces()
    own = {address for interface in interfaces.values() for address in interface.addresses}
    address = environment.get("MASTER_ADDR", "").strip()
    master = facts.look_up(address) if address else None
    several = master is not None and not all(map(network.is_loopback, master.addresses))
    yield "MASTER_ADDR", partial(network.check_master_addr, master, own)
    yield (
        "host name",
        lambda: network.check_host_name(facts.look_up(gethostname()), own, several),
    )
    if interfaces:
        yield "interfaces", partial(network.check_interfaces, environment, interfaces, nccl_wanted)


def _at_memory(world_size: int, nccl_wanted: bool) -> Iterator[tuple[str, Look]]:
    yield (
        "memory",
        lambda: machine.check_memory(world_size, facts.available_bytes(), container_memory()),
    )
    yield (
        "address space",
        lambda: machine.check_address_space(facts.resource_limit("RLIMIT_AS")[0]),
    )
    if sys.platform.startswith("linux"):
        yield (
            machine.SHARED_MEMORY,
            lambda: machine.check_shared_memory(facts.shared_memory(), nccl_wanted),
        )


def _at_processes(
    world_size: int, threads: int, omp_num_threads: str | None
) -> Iterator[tuple[str, Look]]:
    soft, hard = facts.resource_limit("RLIMIT_NOFILE")
    yield "open files", partial(machine.check_open_files, soft, hard, world_size)
    per_rank = threads or max(1, cores() // world_size)
    yield (
        "processes",
        lambda: machine.check_processes(
            world_size, per_rank, *facts.process_limit(), facts.container_processes()
        ),
    )
    yield "cores", partial(machine.check_cores, cores(), world_size, threads, omp_num_threads)
    yield "starting ranks", partial(machine.check_fork, can_fork(), sys.platform)
    earlier = facts.earlier_ranks()
    if earlier is not None:
        yield "earlier ranks", partial(machine.check_earlier_ranks, earlier)


def _at_surroundings() -> Iterator[tuple[str, Look]]:
    yield (
        "temporary folder",
        lambda: machine.check_temporary_folder(facts.temporary_folder()),
    )
