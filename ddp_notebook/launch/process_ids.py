"""The number by which a session knows a process: its host's number and its pid in one int.

Pids are unique on one host only, and those of two containers collide at once. The notebook's own
machine is host 0, so there the number is the pid itself. Who signals a process or reads of it in
/proc asks `host_of` first; what is shown is `pid_of`, with the host's name.
"""

from __future__ import annotations

import os

HOST_VARIABLE = "DDP_NOTEBOOK_HOST"
"""The environment variable with the number of the host that a process is on; unset on host 0."""
_own_host = int(os.environ.get(HOST_VARIABLE) or 0)  # now: a cell may change the environment
_PID_BITS = 22
"""Linux gives no pid above 2**22 (pid_max in proc(5))."""


def process_id(host: int, pid: int) -> int:
    """Return the number of the process `pid` on a host."""
    return host << _PID_BITS | pid


def own_process_id() -> int:
    """Return the number of this process."""
    return process_id(_own_host, os.getpid())


def host_of(number: int) -> int:
    """Return the number of the host that a process is on; 0 is the notebook's own machine."""
    return number >> _PID_BITS


def pid_of(number: int) -> int:
    """Return the pid of a process, by which its host knows it."""
    return number & ((1 << _PID_BITS) - 1)
