"""Where the processes of one session meet: addresses and ports that no other will take."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

LOOPBACK = "127.0.0.1"
_TRIES = 3
_LOWEST_PORT = 30_000
"""Above what is given to services, and above torchrun's 29400 and 29500."""
_PORTS_TRIED = 20
_chosen = random.SystemRandom()
"""The user's own random numbers stay as they are, and their seed, the same for a whole class,
chooses nothing here."""


def own_loopback() -> str:
    """A loopback address that no other session uses, or 127.0.0.1 where there is only that one.

    ipyparallel looks for free ports, and binds them a moment later: of thirty sessions that
    start at once on one address, one found that another had taken its port meanwhile. Linux has
    all of 127.0.0.0/8 for itself, and each address has ports of its own.
    """
    for _ in range(_TRIES):
        address = (
            f"127.{_chosen.randint(1, 254)}.{_chosen.randint(0, 255)}.{_chosen.randint(1, 254)}"
        )
        if _works(address):
            return address
    return LOOPBACK


def _works(address: str) -> bool:
    """True when two sockets of this host reach each other over `address`."""
    try:
        with socket.create_server((address, 0)) as listener:
            socket.create_connection(listener.getsockname(), timeout=1).close()
    except OSError:
        return False
    return True


def free_port(host: str) -> int:
    """A port of `host` that is free now. Raises OSError.

    Where possible one that the system gives to no connection: a second may pass until a rank
    listens, and on a machine with many sessions another would have taken it by then.
    """
    family, kind, proto, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]

    def bound(port: int) -> int:
        with socket.socket(family, kind, proto) as probe:
            probe.bind((address[0], port, *address[2:]))
            return int(probe.getsockname()[1])

    ours = range(_LOWEST_PORT, _first_port_of_connections())
    for port in _chosen.sample(ours, _PORTS_TRIED) if len(ours) >= _PORTS_TRIED else []:
        with contextlib.suppress(OSError):
            return bound(port)
    return bound(0)


def _first_port_of_connections() -> int:
    """Where the ports begin that the system gives to connections (ip(7)); else Linux's usual."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return 32768
