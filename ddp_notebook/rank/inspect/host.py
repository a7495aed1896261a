"""On which host, and in which network, this rank is: the fault lab may have moved it."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path


def network() -> str:
    """This process's network; the same text in all processes that share a loopback interface.

    Empty if not known.
    """
    with contextlib.suppress(OSError):
        booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{booted} {os.readlink('/proc/thread-self/ns/net')}"  # noqa: PTH115
    return ""


def host() -> str:
    """The host name, as this process sees it."""
    return socket.gethostname()
