"""On which host, and in which network, the main thread is.

A thread of Linux may have a network and a host name of its own, and the fault lab puts main on
such a host. What main would reach is asked from there (`as_main`), not from where the thread
that asks happens to be.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_KINDS = ("net", "uts")


@contextlib.contextmanager
def on(host: Mapping[str, str]) -> Iterator[None]:
    """Within, the calling thread is on `host`: the paths of its namespaces ``net`` and ``uts``.

    Threads that it starts meanwhile stay there. An empty `host` changes nothing. Raises OSError.
    """
    if not host:
        yield
        return
    home = [os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY) for kind in _KINDS]
    try:
        for kind in _KINDS:
            _enter_path(host[kind])
        yield
    finally:
        for fd in home:
            _enter(fd)
            os.close(fd)


def as_main(ask: Callable[[], T]) -> T:
    """What `ask` gives on the main thread's host, whichever thread calls this."""
    mains = [f"/proc/self/task/{os.getpid()}/ns/{kind}" for kind in _KINDS]
    if _of("thread-self") == _of(f"self/task/{os.getpid()}"):
        return ask()
    given: list[T] = []
    raised: list[Exception] = []

    def work() -> None:
        try:
            for path in mains:
                _enter_path(path)
            given.append(ask())
        except Exception as error:  # noqa: BLE001  # raised again below, for the caller
            raised.append(error)

    # A thread of its own: the caller must not be left on the other host, whatever happens.
    there = threading.Thread(target=work, name="ddp-as-main", daemon=True)
    there.start()
    there.join()
    if raised:
        raise raised[0]
    return given[0]


def network() -> str:
    """The calling thread's network; the same text on all threads that share a loopback.

    Empty where it cannot be told.
    """
    with contextlib.suppress(OSError):
        booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{booted} {os.readlink('/proc/thread-self/ns/net')}"  # noqa: PTH115
    return ""


def host() -> str:
    """The host name, as the calling thread sees it."""
    return socket.gethostname()


def _of(thread: str) -> list[str]:
    """The namespaces of a thread; none where there is no such thing."""
    with contextlib.suppress(OSError):
        return [os.readlink(f"/proc/{thread}/ns/{kind}") for kind in _KINDS]  # noqa: PTH115
    return []


def _enter_path(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        _enter(fd)
    finally:
        os.close(fd)


def _enter(fd: int) -> None:
    """Have the calling thread enter a namespace. `os.setns` is newer than Python 3.11."""
    if ctypes.CDLL(None, use_errno=True).setns(fd, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
