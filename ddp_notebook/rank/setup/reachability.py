"""Which ranks this rank can reach, and what names resolve to, on the main thread's host."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import select
import socket
import threading
import time
from collections.abc import Sequence

from ddp_notebook import model
from ddp_notebook.rank import torch_private
from ddp_notebook.rank.setup.sockets import TorchSockets

PROBE_TIMEOUT_S = 0.3
RESOLVE_TIMEOUT_S = 0.3


class Resolver:
    """Looks names up. Each lookup runs in a thread of its own, as long as it takes."""

    def __init__(self) -> None:
        self._names: dict[str, tuple[str, ...] | str] = {}
        """The addresses of names, or why they do not resolve."""
        self._threads: dict[str, threading.Thread] = {}

    def lookup(self, host: str) -> tuple[str, ...] | str:
        """The addresses of a name, or why it does not resolve; "" until the resolver answers.

        A resolver may block for many seconds and cannot be interrupted: callers wait at most
        `RESOLVE_TIMEOUT_S`.
        """
        with contextlib.suppress(ValueError):
            return (str(ipaddress.ip_address(host)),)

        def resolve() -> None:
            try:
                entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
                self._names[host] = tuple(dict.fromkeys(str(entry[4][0]) for entry in entries))
            except (OSError, UnicodeError) as error:
                self._names[host] = getattr(error, "strerror", None) or str(error)

        thread = self._threads.get(host)
        if thread is None or not thread.is_alive():
            thread = threading.Thread(target=resolve, name="ddp-resolve", daemon=True)
            self._threads[host] = thread
            thread.start()
        thread.join(RESOLVE_TIMEOUT_S)
        return self._names.get(host, "")

    def resolved(self, host: str) -> dict[str, tuple[str, ...]]:
        """Return the addresses of names, by name; empty while not known."""
        addresses = self.lookup(host) if host else ""
        if isinstance(addresses, str):
            return {host: ()} if addresses else {}
        return {host: tuple(sorted(addresses))}


class Reachability:
    """Connections that this rank tries for the session, as its main thread would."""

    def __init__(self, resolver: Resolver, sockets: TorchSockets) -> None:
        self._resolver = resolver
        self._sockets = sockets

    def store(self, host: str, port: int | None) -> model.Probe:
        """Try to connect to the store as this rank would. It does not disturb the store."""
        if not host or port is None or not 0 < port < 65536:
            return model.Probe()
        target = f"{host}:{port}"
        addresses = self._resolver.lookup(host)
        if isinstance(addresses, str):
            return model.Probe(target, "unresolved" if addresses else "resolving", addresses)
        try:
            with socket.create_connection((addresses[0], port), PROBE_TIMEOUT_S) as connection:
                if torch_private.is_store(connection) is False:
                    return model.Probe(
                        target, "other", "the process that answers is not a store of torch's"
                    )
                return model.Probe(target, "open")
        except TimeoutError:
            return model.Probe(target, "timeout", f"no answer within {PROBE_TIMEOUT_S:g} s")
        except OSError as error:
            return model.Probe(target, "refused", error.strerror or str(error))

    def of_others(self, targets: Sequence[str]) -> tuple[model.Probe, ...]:
        """Try to connect to the addresses of other ranks."""
        own = set(self._sockets.listening())
        # The most addresses to try: a firewall is seen at the first.
        others = [target for target in targets if target not in own][:64]
        return tuple(reach(others))


def reach(targets: Sequence[str]) -> list[model.Probe]:
    """Try to connect to each ``address:port``, to all at once. gloo ignores a connection on which
    nothing is sent."""
    silent = f"no answer within {PROBE_TIMEOUT_S:g} s"
    probes = {target: model.Probe(target, "timeout", silent) for target in targets}
    waiting: dict[int, tuple[socket.socket, str]] = {}
    poll = select.poll()
    with contextlib.ExitStack() as stack:
        for target in targets:
            host, _, port = target.rpartition(":")
            connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            stack.enter_context(connection).setblocking(False)
            number = connection.connect_ex((host, int(port)))
            if number == errno.EINPROGRESS:
                waiting[connection.fileno()] = (connection, target)
                poll.register(connection, select.POLLOUT)
            else:
                probes[target] = _probe(target, number)
        deadline, over = time.monotonic() + PROBE_TIMEOUT_S, False
        while waiting and not over:
            # Checked once more after the deadline: this thread may have had no core until then.
            over = time.monotonic() > deadline
            for fd, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                poll.unregister(fd)
                connection, target = waiting.pop(fd)
                number = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                probes[target] = _probe(target, number)
    return list(probes.values())


def _probe(target: str, number: int) -> model.Probe:
    if number:
        return model.Probe(target, "refused", os.strerror(number))
    return model.Probe(target, "open")
