"""Checks of the network: ports, host names, interfaces."""

from __future__ import annotations

import errno
import ipaddress
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ddp_notebook.model.doctor import Check


class Holder(NamedTuple):
    """A process that holds a port. `pid` is None where the system does not say."""

    pid: int | None
    command: str

    def __str__(self) -> str:
        if self.pid is None:
            return "a process of another user"
        return f"pid {self.pid} ({self.command or 'its command is not known'})"


@dataclass(frozen=True, slots=True)
class Lookup:
    """What a host name resolves to; `error` is why it does not, else empty."""

    name: str
    addresses: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface: whether it is up, and its addresses."""

    up: bool
    addresses: tuple[str, ...]


# --------------------------------------------------------------------------- ports


def check_port(port: int, asked_by: str, refused: int, holders: Sequence[Holder]) -> Check:
    """The port of the store can be listened on.

    `asked_by` names the option or the variable it comes from; `refused` is the errno of the
    attempt, 0 if it succeeded. `holders` are the processes known to hold the port.
    """
    name = f"port {port}"
    elsewhere = (
        "Leave --master-port out (%ddp_init chooses a free port), or give another one."
        if asked_by == "--master-port"
        else f"Give another {asked_by}, or unset it: %ddp_init chooses a free port."
    )
    if refused == errno.EADDRINUSE:
        who = ", ".join(str(holder) for holder in holders) or "a process that cannot be identified"
        pids = sorted({holder.pid for holder in holders if holder.pid})
        end = f" If it is a job of yours that should be over: kill {pids[0]}" if pids else ""
        return Check.failure(name, f"{asked_by} is in use by {who}", elsewhere + end)
    if refused == errno.EACCES:
        return Check.failure(
            name, f"{asked_by} is below 1024, where only the administrator may listen", elsewhere
        )
    if refused:
        why = errno.errorcode.get(refused, str(refused))
        return Check.failure(name, f"{asked_by} cannot be listened on ({why})", elsewhere)
    return Check.ok(name, "free")


# --------------------------------------------------------------------------- names


def is_loopback(address: str) -> bool:
    """Return whether an address only reaches this host itself."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def check_host_name(lookup: Lookup, own: Collection[str], several_hosts: bool) -> Check:
    """This host's name resolves to it. `own` are the addresses of its interfaces, if known.

    A loopback address is as good as any on one host. With `several_hosts` it is wrong: the other
    hosts would connect to themselves.
    """
    name = "host name"
    shown = f"{lookup.name} resolves to {', '.join(lookup.addresses)}"
    remedy = "Name the interface to use: GLOO_SOCKET_IFNAME=eth0 (ip addr lists them)"
    if lookup.error:
        return Check.warning(
            name,
            f"{lookup.name} does not resolve ({lookup.error}): gloo falls back to loopback, so "
            "only ranks of this host can connect",
            f"Add it to /etc/hosts, or: {remedy}",
        )
    if all(is_loopback(address) for address in lookup.addresses):
        if several_hosts:
            return Check.warning(name, f"{shown}: other hosts would connect to themselves", remedy)
        return Check.ok(name, f"{shown}, which is enough on one host")
    if own and not set(lookup.addresses) & set(own):
        return Check.warning(name, f"{shown}, which is no address of this host", remedy)
    return Check.ok(name, shown)


def check_master_addr(lookup: Lookup | None, own: Collection[str]) -> Check:
    """MASTER_ADDR, where it is set (None: it is not), is an address of this host.

    `own` are the addresses of its interfaces, if known.
    """
    name = "MASTER_ADDR"
    if lookup is None:
        return Check.ok(name, "not set: %ddp_init uses 127.0.0.1")
    if lookup.error:
        return Check.failure(
            name,
            f"{lookup.name} does not resolve ({lookup.error})",
            "Give an address or a name that every host knows: MASTER_ADDR=127.0.0.1 for one host",
        )
    shown = lookup.name
    if lookup.addresses != (lookup.name,):
        shown += f" resolves to {', '.join(lookup.addresses)}"
    leads_here = any(a in own or is_loopback(a) for a in lookup.addresses)
    if own and not leads_here:
        return Check.warning(
            name,
            f"{shown}, which is another host: rank 0 of a script must run there",
            "For one host: MASTER_ADDR=127.0.0.1, or unset it",
        )
    return Check.ok(name, f"{shown}, which is this host" if leads_here else shown)


# --------------------------------------------------------------------------- interfaces


def check_interfaces(
    environment: Mapping[str, str], interfaces: Mapping[str, Interface], nccl_wanted: bool
) -> tuple[Check, ...]:
    """The interfaces that variables name exist, are up and have an address.

    gloo and TensorPipe need full names; NCCL takes prefixes. A wrong variable of NCCL is only a
    warning unless `nccl_wanted`.
    """
    usable = ", ".join(n for n in sorted(interfaces) if not _unusable(interfaces[n])) or "none"
    checks = []
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value, of_nccl = environment.get(variable, ""), variable.startswith("NCCL")
        if not value:
            continue
        trouble = _interface_trouble(variable, value, interfaces)
        remedy = f"Unset {variable}, or name one of: {usable}"
        if not trouble:
            checks.append(Check.ok(variable, value))
        elif of_nccl and not nccl_wanted:
            found = f"{value}: {trouble} (only NCCL reads it)"
            checks.append(Check.warning(variable, found, remedy))
        else:
            checks.append(Check.failure(variable, f"{value}: {trouble}", remedy))
    return tuple(checks) or (Check.ok("interfaces", f"{usable} up; no variable chooses one"),)


def _interface_trouble(variable: str, value: str, interfaces: Mapping[str, Interface]) -> str:
    """Return why the interfaces that `value` names cannot be used; empty when they can."""
    if variable.startswith("NCCL"):
        chosen = nccl_interfaces(value, interfaces)
        if any(not _unusable(interfaces[name]) for name in chosen):
            return ""
        return (
            f"{chosen[0]} {_unusable(interfaces[chosen[0]])}" if chosen else "no interface matches"
        )
    # gloo splits at commas, TensorPipe takes the whole text as one name. Not stripped: torch does
    # not strip them either.
    for name in value.split(",") if variable.startswith("GLOO") else [value]:
        if name not in interfaces:
            form = "; only NCCL reads ^ and =" if name[:1] in ("^", "=") else ""
            return f"there is no interface {name!r}{form}"
        if why := _unusable(interfaces[name]):
            return f"{name} {why}"
    return ""


def _unusable(interface: Interface) -> str:
    """Return why it cannot be used; empty when it can."""
    if not interface.up:
        return "is down"
    return "" if interface.addresses else "has no address"


def nccl_interfaces(value: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return the interfaces that NCCL_SOCKET_IFNAME chooses among `names`.

    ``eth`` means every name that starts so, ``=eth0`` exactly that name, ``^docker`` all names
    but those, ``^=docker0`` all but that one. Commas separate several; the sign stands once.
    """
    rest, exclude = (value[1:], True) if value.startswith("^") else (value, False)
    rest, exact = (rest[1:], True) if rest.startswith("=") else (rest, False)
    wanted = [part.partition(":")[0] for part in rest.split(",") if part]  # without a port

    def matches(name: str) -> bool:
        return name in wanted if exact else name.startswith(tuple(wanted))

    return tuple(name for name in names if matches(name) is not exclude)
