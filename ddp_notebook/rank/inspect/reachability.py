"""Whom this rank can reach, and what names mean here. Asked on the host that main is on."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ddp_notebook.model import Probe, codec
from ddp_notebook.rank.inspect import host as place
from ddp_notebook.rank.setup import sockets

PROBE_TIMEOUT_S = 0.3
RESOLVE_TIMEOUT_S = 0.3
_MOST_TARGETS = 64
"""More ranks than that are not knocked at: a firewall shows at the first."""


def store(host: str, port: int | None) -> Probe:
    """Try to connect to the store as this rank would. A store that listens does not mind."""
    if not host or port is None or not 0 < port < 65536:
        return Probe()
    target = f"{host}:{port}"
    found = lookup(host)
    if isinstance(found, str):
        return Probe(target, "unresolved" if found else "resolving", found)
    try:
        with socket.create_connection((found[0], port), PROBE_TIMEOUT_S):
            return Probe(target, "open")
    except TimeoutError:
        return Probe(target, "timeout", f"no answer within {PROBE_TIMEOUT_S:g} s")
    except OSError as error:
        return Probe(target, "refused", error.strerror or str(error))


# -- the other ranks ---------------------------------------------------------------------


def answer(about: Mapping[str, Any]) -> dict[str, Any]:
    """Probes of ``about["targets"]``, where other ranks listen, as JSON."""
    own = set(sockets.listening())
    targets = [target for target in about["targets"] if target not in own][:_MOST_TARGETS]
    return {"reach": codec.encode(place.as_main(lambda: reach(targets)))}


def reach(targets: Sequence[str]) -> list[Probe]:
    """Try to connect to each ``address:port``, to all at once. gloo does not mind a stranger that
    leaves without a word."""
    waiting: dict[int, tuple[socket.socket, str]] = {}
    found: dict[str, Probe] = {}
    with contextlib.ExitStack() as stack:
        for target in targets:
            host, _, port = target.rpartition(":")
            knocking = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            stack.enter_context(knocking).setblocking(False)
            number = knocking.connect_ex((host, int(port)))
            if number == errno.EINPROGRESS:
                waiting[knocking.fileno()] = (knocking, target)
            else:
                found[target] = _probe(target, number)
        found.update(_await_answers(waiting))
    return [found[target] for target in targets]


def _await_answers(waiting: dict[int, tuple[socket.socket, str]]) -> dict[str, Probe]:
    """How each of these connections ends, within `PROBE_TIMEOUT_S`."""
    poll = select.poll()
    for fd in waiting:
        poll.register(fd, select.POLLOUT)
    found: dict[str, Probe] = {}
    deadline = time.monotonic() + PROBE_TIMEOUT_S
    over = False
    while len(found) < len(waiting) and not over:
        # Looked at once more after the deadline: this thread may have lacked a CPU until then.
        over = time.monotonic() > deadline
        for fd, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            poll.unregister(fd)
            knocking, target = waiting[fd]
            found[target] = _probe(target, knocking.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
    silent = f"no answer within {PROBE_TIMEOUT_S:g} s"
    for _, target in waiting.values():
        found.setdefault(target, Probe(target, "timeout", silent))
    return found


def _probe(target: str, number: int) -> Probe:
    return Probe(target, "refused", os.strerror(number)) if number else Probe(target, "open")


# -- names -------------------------------------------------------------------------------

_names: dict[str, tuple[str, ...] | str] = {}
"""What names resolve to, or why they do not."""
_asked_for: dict[str, threading.Thread] = {}


def lookup(host: str) -> tuple[str, ...] | str:
    """The addresses of a name, or why it has none; "" while the resolver has not answered.

    A resolver may take many seconds, deaf to everything: nobody waits for it longer than
    `RESOLVE_TIMEOUT_S`.
    """
    with contextlib.suppress(ValueError):
        return (str(ipaddress.ip_address(host)),)
    asking = _asked_for.get(host)
    if asking is None or not asking.is_alive():
        asking = threading.Thread(target=_resolve, args=(host,), name="ddp-resolve", daemon=True)
        _asked_for[host] = asking
        asking.start()
    asking.join(RESOLVE_TIMEOUT_S)
    return _names.get(host, "")


def _resolve(host: str) -> None:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        _names[host] = tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
    except (OSError, UnicodeError) as error:
        _names[host] = getattr(error, "strerror", None) or str(error)


def resolved(host: str) -> dict[str, tuple[str, ...]]:
    """What a name resolves to, by name; nothing while that is not known."""
    found = lookup(host) if host else ""
    if isinstance(found, str):
        return {host: ()} if found else {}
    return {host: tuple(sorted(found))}
