"""Hosts a store; says why it cannot listen, and who listens there instead."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from datetime import timedelta

from torch.distributed import TCPStore

from ddp_notebook.model import Category
from ddp_notebook.rank.setup.errors import StageError


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on `host` only. Raises OSError."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def host_store(host: str, port: int, timeout: timedelta) -> TCPStore:
    """Host a store on `host` only; port 0: the system chooses. Raises OSError, RuntimeError."""
    listener = listen(host, port)
    return TCPStore(
        host,
        listener.getsockname()[1],
        None,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def explain(error: OSError | RuntimeError, host: str, port: int) -> StageError:
    """Why the store cannot listen, and what to type; a category if another process listens."""
    if isinstance(error, RuntimeError):  # torch's own, of its store
        return StageError(f"torch's store cannot open: {error}", "Check the machine: %ddp_doctor")
    no_address = "Leave --master-addr out (127.0.0.1 is used), or give an address of this machine."
    if isinstance(error, socket.gaierror):
        return StageError(f"MASTER_ADDR {host!r} does not resolve: {error.strerror}.", no_address)
    if error.errno == errno.EADDRINUSE:
        return StageError(
            f"Port {port} on {host} is in use{holder(port)}.",
            "Leave --master-port out (a free port is chosen), or give another one.",
            Category.PORT_IN_USE.value,
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return StageError(f"MASTER_ADDR {host} is not an address of this machine.", no_address)
    if error.errno == errno.EACCES:
        return StageError(
            f"Port {port} is reserved: ports below 1024 need administrator rights.",
            "Leave --master-port out, or give a port from 1024 to 65535.",
        )
    return StageError(
        f"The store cannot listen on {host}:{port}: {error}.",
        "Leave --master-addr and --master-port out.",
    )


def holder(port: int) -> str:
    """Which process listens on `port`, if known: `` by pid 123: python train.py``."""
    import psutil  # a prepared job needs it only here, and it takes a while

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            local = connection.laddr
            if local and local.port == port and connection.status == psutil.CONN_LISTEN:
                if connection.pid == os.getpid():
                    return " by this rank's own process"
                if connection.pid is None:
                    return " by another user's process"
                command = " ".join(psutil.Process(connection.pid).cmdline())
                return f" by pid {connection.pid}: {command[:120]}"
    return ""
