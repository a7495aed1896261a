"""Addresses and ports for a session's processes that no other process takes."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

LOOPBACK = "127.0.0.1"
_PORTS_TRIED = 20
_random = random.SystemRandom()
"""Not the `random` module's global generator: the user may have seeded it (a whole class with the
same seed), and its next numbers must not change."""


def own_loopback() -> str:
    """Return a loopback address that no other session uses; 127.0.0.1 where that is the only one.

    ipyparallel chooses free ports and binds them a moment later: when thirty sessions started at
    once on one address, one of them lost a port to another. On Linux all of 127.0.0.0/8 is
    loopback, and each address has ports of its own.
    """
    for _ in range(3):
        address = (
            f"127.{_random.randint(1, 254)}.{_random.randint(0, 255)}.{_random.randint(1, 254)}"
        )
        if _works(address):
            return address
    return LOOPBACK


def _works(address: str) -> bool:
    """Return True when two sockets of this host can connect over `address`."""
    try:
        with socket.create_server((address, 0)) as listener:
            socket.create_connection(listener.getsockname(), timeout=1).close()
    except OSError:
        return False
    return True


def why_no_loopback() -> str:
    """Why no process can reach another one over 127.0.0.1, and what to type; empty if they can."""
    if _works(LOOPBACK):
        return ""
    return (
        f"No process here can reach another one at {LOOPBACK}: the loopback interface is down, as "
        "in a new network namespace, or it has no IPv4 address. Type in a shell, as root: ip link "
        f"set lo up; ip address add {LOOPBACK}/8 dev lo"
    )


def free_port(host: str) -> int:
    """Return a port of `host` that is free now. Raises OSError.

    If possible outside the ephemeral range: a second may pass until a rank listens, and on a busy
    machine a connection could take the port meanwhile.
    """
    family, kind, proto, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]

    def bound(port: int) -> int:
        with socket.socket(family, kind, proto) as probe:
            probe.bind((address[0], port, *address[2:]))
            return int(probe.getsockname()[1])

    first_ephemeral = 32768  # Linux's default (ip(7))
    with contextlib.suppress(OSError, ValueError, IndexError):
        ephemeral = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
        first_ephemeral = int(ephemeral.split()[0])
    # Above the ports of services, and above torchrun's 29400 and 29500.
    reserved = range(30_000, first_ephemeral)
    for port in _random.sample(reserved, _PORTS_TRIED) if len(reserved) >= _PORTS_TRIED else []:
        with contextlib.suppress(OSError):
            return bound(port)
    return bound(0)
