"""Checks of the network: ports, host names, interfaces."""

from __future__ import annotations

import errno
import ipaddress
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddp_notebook.model.doctor import Check

_SLOW_LOOKUP_S = 2.0


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds a port. `pid` is None where the system does not say."""

    pid: int | None
    command: str
    listens: bool = True

    def __str__(self) -> str:
        what = "" if self.listens else ", as the near end of a connection"
        if self.pid is None:
            return f"a process of another user{what}"
        return f"pid {self.pid} ({self.command or 'its command is not known'}){what}"


@dataclass(frozen=True, slots=True)
class Ports:
    """The range that the system takes free ports from, ends included, and how many are in use.

    `in_use` is None where that cannot be counted.
    """

    first: int
    last: int
    in_use: int | None

    @property
    def count(self) -> int:
        """How many there are."""
        return max(0, self.last - self.first + 1)


@dataclass(frozen=True, slots=True)
class Lookup:
    """What a host name resolves to; `error` is why it does not, else empty."""

    name: str
    addresses: tuple[str, ...] = ()
    error: str = ""
    took_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface: whether it is up, and its addresses."""

    up: bool
    addresses: tuple[str, ...]


# --------------------------------------------------------------------------- ports


def check_port(
    port: int, asked_by: str, refused: int, holders: Sequence[Holder], ports: Ports | None
) -> Check:
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
    if ports is not None and ports.first <= port <= ports.last:
        span = f"{ports.first}-{ports.last}"
        return Check.ok(name, f"free now; any connection may get it (it is one of {span})")
    return Check.ok(name, "free")


def ports_needed(world_size: int) -> int:
    """Ports that a session of so many ranks takes from the system's range.

    Measured: a rank has about ten connections to the session's processes, and with gloo one to
    each other rank, for which one of the two needs a port.
    """
    return 16 + world_size * (12 + world_size // 2)


def check_ports(ports: Ports, world_size: int) -> Check:
    """Enough ports of the system's range are free."""
    name, needed = "free ports", ports_needed(world_size)
    remedy = (
        "Widen the range: sudo sysctl net.ipv4.ip_local_port_range='32768 60999'. See what "
        "holds the ports: ss -tanp"
    )
    span = f"{ports.first}-{ports.last}"
    if ports.in_use is None:
        free, found = ports.count, f"{ports.count:,} in {span} (how many are in use is unknown)"
    else:
        free = ports.count - ports.in_use
        found = f"{max(free, 0):,} of {ports.count:,} in {span}, {ports.in_use:,} in use"
    ranks = f"{world_size} ranks take about {needed:,}"
    if free < needed:
        return Check.failure(name, f"{found}; {ranks}", remedy)
    if free < 4 * needed:
        return Check.warning(name, f"{found}; {ranks}", remedy)
    return Check.ok(name, found)


def check_loopback(trouble: str) -> Check:
    """Processes of this host reach each other; `trouble` is why not, else empty."""
    name = "loopback"
    if trouble:
        return Check.failure(
            name,
            f"no connection over 127.0.0.1: {trouble}",
            "Look at the firewall and at: ip addr show lo (it must be UP with 127.0.0.1)",
        )
    return Check.ok(name, "a connection over 127.0.0.1 to a port that the system chose works")


# --------------------------------------------------------------------------- names


def is_loopback(address: str) -> bool:
    """Whether an address only reaches this host itself."""
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
    if lookup.took_s > _SLOW_LOOKUP_S:
        return Check.warning(
            name,
            f"{shown}, after {lookup.took_s:.0f} s; each rank looks it up",
            f"Add it to /etc/hosts: {lookup.addresses[0]} {lookup.name}",
        )
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
    checks = []
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        if environment.get(variable):
            trouble = _interface_trouble(variable, environment[variable], interfaces)
            checks.append(_interface_check(variable, environment, trouble, interfaces, nccl_wanted))
    if checks:
        return tuple(checks)
    usable = ", ".join(_usable(interfaces)) or "none"
    return (Check.ok("interfaces", f"{usable} up; no variable chooses one"),)


def _interface_check(
    variable: str,
    environment: Mapping[str, str],
    trouble: str,
    interfaces: Mapping[str, Interface],
    nccl_wanted: bool,
) -> Check:
    value = environment[variable]
    if not trouble:
        return Check.ok(variable, value)
    usable = ", ".join(_usable(interfaces)) or "none is up"
    remedy = f"Unset {variable}, or name one of: {usable}"
    if variable.startswith("NCCL") and not nccl_wanted:
        return Check.warning(variable, f"{value}: {trouble} (only NCCL reads it)", remedy)
    return Check.failure(variable, f"{value}: {trouble}", remedy)


def _interface_trouble(variable: str, value: str, interfaces: Mapping[str, Interface]) -> str:
    """Why the interfaces that `value` names cannot be used; empty when they can."""
    if variable.startswith("NCCL"):
        chosen = nccl_interfaces(value, interfaces)
        if not chosen:
            return "no interface matches"
        usable = [name for name in chosen if not _unusable(interfaces[name])]
        return "" if usable else f"{chosen[0]} {_unusable(interfaces[chosen[0]])}"
    # Not stripped: torch does not strip them either.
    names = value.split(",") if variable.startswith("GLOO") else [value]
    for name in names:
        if name not in interfaces:
            form = "; only NCCL reads ^ and =" if name[:1] in ("^", "=") else ""
            return f"there is no interface {name!r}{form}"
        if _unusable(interfaces[name]):
            return f"{name} {_unusable(interfaces[name])}"
    return ""


def _usable(interfaces: Mapping[str, Interface]) -> list[str]:
    return sorted(name for name, interface in interfaces.items() if not _unusable(interface))


def _unusable(interface: Interface) -> str:
    """Why it cannot be used; empty when it can."""
    if not interface.up:
        return "is down"
    return "" if interface.addresses else "has no address"


def nccl_interfaces(value: str, names: Iterable[str]) -> tuple[str, ...]:
    """The interfaces that NCCL_SOCKET_IFNAME chooses among `names`.

    ``eth`` means every name that starts so, ``=eth0`` exactly that name, ``^docker`` all names
    but those, ``^=docker0`` all but that one. Commas separate several; the sign stands once.
    """
    rest, exclude = (value[1:], True) if value.startswith("^") else (value, False)
    rest, exact = (rest[1:], True) if rest.startswith("=") else (rest, False)
    wanted = [part.partition(":")[0] for part in rest.split(",") if part]  # without a port

    def matches(name: str) -> bool:
        return name in wanted if exact else name.startswith(tuple(wanted))

    return tuple(name for name in names if matches(name) is not exclude)
