"""The store process: it hosts the session's TCPStore, as torchrun's agent does.

It is not the notebook kernel, which never loads torch, and not rank 0, so that the store
outlives every rank. It listens on the address it is given and on no other.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
from datetime import timedelta

import psutil
from torch.distributed import TCPStore

from ddp_notebook.model import SESSION, Category, StoreFailed, StoreOpened
from ddp_notebook.rank.events import EventSender
from ddp_notebook.rank.setup.errors import StageError


def main(url: str, key: str, host: str, port: int) -> None:
    """Host a store at `host`:`port` (0: the system chooses) until this process is ended."""
    events = EventSender(SESSION, url, key)
    try:
        listener = listen(host, port)
    except OSError as error:
        why = explain(error, host, port)
        events.emit(
            StoreFailed,
            cause=why.cause,
            remedy=why.remedy,
            pid=os.getpid(),
            category=why.category,
        )
        events.close()
        return
    actual_port = listener.getsockname()[1]
    store = TCPStore(
        host,
        actual_port,
        None,
        is_master=True,
        timeout=timedelta(seconds=30),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    events.emit(StoreOpened, host=host, port=actual_port, pid=os.getpid())
    signal.pause()
    del store


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on `host` alone. Raises OSError."""
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


def explain(error: OSError, host: str, port: int) -> StageError:
    """Why the store cannot listen, and what to type; its category where another process listens."""
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
            f"Port {port} may not be used: ports below 1024 are the administrator's.",
            "Leave --master-port out, or give a port from 1024 to 65535.",
        )
    return StageError(
        f"The store cannot listen on {host}:{port}: {error}.",
        "Leave --master-addr and --master-port out.",
    )


def holder(port: int) -> str:
    """Who listens on `port`, as far as it can be known: `` by pid 123: python train.py``."""
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
