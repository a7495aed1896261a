"""The system's facts about a process: its state, its CPU time, its sockets' queues."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ddp_notebook.launch.process_groups import stat_fields

_LISTEN = "0A"
_MOST_SOCKETS = 65_536


@dataclass(frozen=True, slots=True)
class Used:
    """A process at one moment. What differs between two of them shows that it moved.

    `ticks` is the CPU time of all its threads, in the system's ticks; `queues` has what waits in
    each of its TCP connections, to be sent and to be read, in bytes.
    """

    state: str
    """The system's letter: R runs, S sleeps, T is stopped, Z has ended."""
    ticks: int
    queues: Mapping[str, tuple[int, int]]
    cuda: bool = False
    """It has the driver of a GPU loaded: then it may wait for the GPU."""


def used(pid: int) -> Used | None:
    """What the system knows of it now; None of one that is gone, or another user's."""
    try:
        words = stat_fields(Path(f"/proc/{pid}/stat"))
        queues = _queues(pid)
        cuda = "libcuda.so" in Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except (OSError, IndexError):
        return None
    return Used(words[0], int(words[11]) + int(words[12]), queues, cuda)


def listens(pid: int, port: int) -> bool | None:
    """Whether a process listens on a TCP port in the network of a process; None if unknown."""
    try:
        rows = list(_tcp(pid))
    except OSError:
        return None
    return any(state == _LISTEN and at == port for _, at, state, *_ in rows)


def connected(pid: int) -> frozenset[int]:
    """The ports to which a process has TCP connections; none where unknown."""
    try:
        own = set(_sockets(pid))
        return frozenset(row[-1] for row in _tcp(pid) if row[0] in own and row[-1])
    except OSError:
        return frozenset()


def ticks_in(seconds: float) -> float:
    """So many ticks a thread has used that ran for so long."""
    return seconds * os.sysconf("SC_CLK_TCK")


def _queues(pid: int) -> dict[str, tuple[int, int]]:
    own = set(_sockets(pid))
    return {
        inode: (to_send, to_read)
        for inode, _, state, to_send, to_read, _ in _tcp(pid)
        if inode in own and state != _LISTEN
    }


def _sockets(pid: int) -> Iterable[str]:
    for path in list(Path(f"/proc/{pid}/fd").iterdir())[:_MOST_SOCKETS]:
        try:
            name = str(path.readlink())
        except OSError:
            continue  # closed meanwhile
        if name.startswith("socket:["):
            yield name[8:-1]


def _tcp(pid: int) -> Iterable[tuple[str, int, str, int, int, int]]:
    """Each TCP socket of its network: inode, port, state, bytes to send, to read, peer's port."""
    for name in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{name}")
        if name == "tcp6" and not path.exists():
            return  # a kernel without IPv6
        for line in path.read_text().splitlines()[1:]:
            words = line.split()
            to_send, _, to_read = words[4].partition(":")
            port, other = (int(words[n].rpartition(":")[2], 16) for n in (1, 2))
            yield words[9], port, words[3], int(to_send, 16), int(to_read, 16), other
