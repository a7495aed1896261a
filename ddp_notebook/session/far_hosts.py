"""The facts that a session needs of the hosts that its ranks are on, once their agents are there.

Where the ranks meet, over which interface, what each host has, and what the user is told of it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ddp_notebook.errors import SetupFailed, UsageMistake
from ddp_notebook.launch.devices import DevicePlan, plan_devices
from ddp_notebook.launch.hosts_client import HostsClient
from ddp_notebook.launch.placement import Hello, Placement
from ddp_notebook.model import Loading, counted, name_ranks
from ddp_notebook.session.options import InitOptions
from ddp_notebook.session.preflight import why_too_little_memory
from ddp_notebook.session.record import Record


@dataclass(frozen=True)
class FarHosts:
    """The hosts of a session's ranks, by their numbers."""

    hellos: Mapping[int, Hello]
    master_addr: str
    """Where the store listens: an address of the first host that the others reach."""
    interfaces: Mapping[int, str]
    """The interface of each host over which ranks connect."""
    devices: DevicePlan
    clock_offsets_ns: Mapping[int, int]
    """By rank, what is added to its monotonic times to have this machine's."""


def reach(client: HostsClient, options: InitOptions, folder: Path, record: Record) -> FarHosts:
    """Start the agents of all hosts, and plan the ranks by what they say.

    How far each is, and what the user should know, is noted in `record`. Raises SetupFailed,
    UsageMistake.
    """
    placement = options.placement

    def seen(host: int, at: str) -> None:  # from any thread, also when it is over
        if not (client.ready.done() or record.snapshot.ended):
            loading = record.snapshot.loading or Loading(time.monotonic_ns())
            hosts = {**loading.hosts, placement.name(host): at}
            record.note(loading=replace(loading, hosts=hosts))

    client.reach(folder, seen, options.timeout_s)
    hellos = {host: client.hello(host) for host in placement.hosts}
    for host, hello in hellos.items():
        name, count = placement.name(host), len(placement.ranks(host))
        fits = f"%ddp_init --hosts {name}:"
        why = hello.limits or why_too_little_memory(count, hello.memory_bytes or None, fits)
        if why:
            raise SetupFailed(f"Host {name}: {why}")
    master = options.master_addr if options.names_master else _master(client, hellos)
    interfaces = {}
    for host in hellos:
        facing = client.question(host, "facing", address=master) or {}
        interfaces[host] = facing.get("interface", "")
        if not interfaces[host]:
            raise SetupFailed(
                f"Host {placement.name(host)} has no way to {master}, where the ranks meet "
                f"(on {placement.name(1)}). Name an address of that host which all hosts reach: "
                "--master-addr"
            )
    devices = _devices(options, placement, hellos)
    notes = _notes(placement, hellos)
    if len(hellos) > 1:
        over = ", ".join(f"{interfaces[host]} on {placement.name(host)}" for host in hellos)
        notes += (
            f"The ranks meet at {master} and connect over {over}. torch's store and gloo do not "
            "check who connects: whoever reaches these addresses can disturb the ranks.",
            "Collectives that do not match are blocked before they are sent between ranks of one "
            "host only; between hosts %ddp_why finds them in the hang.",
        )
    record.note(backend=devices.backend, notes=(*record.snapshot.notes, *devices.notes, *notes))
    offsets = {r: hello.clock_offset_ns for h, hello in hellos.items() for r in placement.ranks(h)}
    return FarHosts(hellos, master, interfaces, devices, offsets)


def _master(client: HostsClient, hellos: Mapping[int, Hello]) -> str:
    """Return an address of the first host: the one that it has towards the second."""
    others = [hello.address for host, hello in hellos.items() if host > 1 and hello.address]
    if len(hellos) == 1:
        return "127.0.0.1"
    facing = client.question(1, "facing", address=others[0]) if others else None
    address = (facing or {}).get("address") or hellos[1].address
    if not address:
        raise SetupFailed(
            f"It is not known at which address the other hosts reach {hellos[1].name}, where the "
            "ranks meet. Name it: --master-addr"
        )
    return str(address)


def _devices(options: InitOptions, placement: Placement, hellos: Mapping[int, Hello]) -> DevicePlan:
    """Plan the devices of each host by its own GPUs, with one backend for all."""

    def planned(device: str, backend: str) -> list[DevicePlan]:
        plans = []
        for host, hello in hellos.items():
            try:
                plan = plan_devices(
                    len(placement.ranks(host)),
                    device,
                    backend,
                    options.gpus,
                    hello.gpus,
                    share_gpu=options.share_gpu,
                    for_gpus=hello.for_gpus,
                )
            except UsageMistake as error:
                raise UsageMistake(f"Host {placement.name(host)}: {error}") from None
            plans.append(plan)
        return plans

    plans = planned(options.device, options.backend)
    if len({plan.device for plan in plans}) > 1:
        without = [
            placement.name(host)
            for host, plan in zip(hellos, plans, strict=True)
            if plan.device == "cpu"
        ]
        note = f"No GPU is visible on {', '.join(without)}: all ranks run on CPUs, with gloo."
        return replace(joined(planned("cpu", options.backend)), notes=(note,))
    if len({plan.backend for plan in plans}) > 1:  # on one host ranks share GPUs: gloo for all
        plans = planned(options.device, "gloo")
    return joined(plans)


def joined(plans: Sequence[DevicePlan]) -> DevicePlan:
    """Return the plans of several hosts as one for all ranks, in order."""
    return replace(
        plans[0],
        devices=tuple(device for plan in plans for device in plan.devices),
        gpus=tuple(gpu for plan in plans for gpu in plan.gpus),
        environment=tuple(each for plan in plans for each in plan.environment),
        notes=tuple(dict.fromkeys(note for plan in plans for note in plan.notes)),
    )


def _notes(placement: Placement, hellos: Mapping[int, Hello]) -> tuple[str, ...]:
    notes = []
    for host, hello in hellos.items():
        ranks = placement.ranks(host)
        if len(ranks) > hello.cores:
            who = name_ranks(ranks).capitalize()
            notes.append(
                f"{who} share {counted(hello.cores, 'CPU core')} on {placement.name(host)}: "
                "fine for learning, but timings are not meaningful."
            )
    torches = {placement.name(host): hello.torch for host, hello in hellos.items()}
    if len({*torches.values()}) > 1:
        which = ", ".join(f"{version} on {name}" for name, version in torches.items())
        notes.append(
            f"The hosts have different releases of torch: {which}. Collectives between releases "
            "are not tested; install the same one on all."
        )
    return tuple(notes)
