"""The system's facts about a process: its state, its CPU time, its sockets' queues."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple

from ddp_notebook.launch.process_groups import stat_fields
from ddp_notebook.rank.prepared.processes import read

_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_ESTABLISHED, _LISTEN = "01", "0A"
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


def is_torchrun(pid: int) -> bool:
    """Whether a process is torchrun's agent, by its command line."""
    try:
        words = read(pid, "cmdline")
    except OSError:
        return False
    return any(name in words for name in _TORCHRUN)


def listens(pid: int, port: int) -> bool | None:
    """Whether a process listens on a TCP port in the network of a process; None if unknown."""
    try:
        rows = list(_tcp(pid))
    except OSError:
        return None
    return any(row.state == _LISTEN and _port(row.at) == port for row in rows)


def connected(pid: int) -> frozenset[int]:
    """The ports to which a process has TCP connections; none where unknown."""
    try:
        own = set(_sockets(pid))
        return frozenset(
            _port(row.other) for row in _tcp(pid) if row.inode in own and _port(row.other)
        )
    except OSError:
        return frozenset()


def connected_hosts(pid: int, port: int) -> frozenset[str]:
    """Addresses of other hosts that have TCP connections to or from a port in its network."""
    try:
        rows = [(row.at, row.other) for row in _tcp(pid) if row.state == _ESTABLISHED]
    except OSError:
        return frozenset()
    own = {_address(at) for at in {at.rpartition(":")[0] + ":" for at, _ in rows}}
    met = {_address(other) for at, other in rows if port in (_port(at), _port(other))}
    return frozenset(str(address) for address in met - own if not address.is_loopback)


def ticks_in(seconds: float) -> float:
    """So many ticks a thread has used that ran for so long."""
    return seconds * os.sysconf("SC_CLK_TCK")


def _queues(pid: int) -> dict[str, tuple[int, int]]:
    own = set(_sockets(pid))
    return {row.inode: row.queued for row in _tcp(pid) if row.inode in own and row.state != _LISTEN}


def _sockets(pid: int) -> Iterable[str]:
    for path in list(Path(f"/proc/{pid}/fd").iterdir())[:_MOST_SOCKETS]:
        try:
            name = str(path.readlink())
        except OSError:
            continue  # closed meanwhile
        if name.startswith("socket:["):
            yield name[8:-1]


class _Socket(NamedTuple):
    """A TCP socket. `at` and `other` are its own end and its peer's, as the system writes them."""

    inode: str
    state: str
    queued: tuple[int, int]
    """Bytes to be sent, and to be read."""
    at: str
    other: str


def _tcp(pid: int) -> Iterable[_Socket]:
    """Each TCP socket of its network."""
    for name in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{name}")
        if name == "tcp6" and not path.exists():
            return  # a kernel without IPv6
        for line in path.read_text().splitlines()[1:]:
            words = line.split()
            to_send, _, to_read = words[4].partition(":")
            queued = int(to_send, 16), int(to_read, 16)
            yield _Socket(words[9], words[3], queued, words[1], words[2])


def _port(end: str) -> int:
    return int(end.rpartition(":")[2], 16)


def _address(end: str) -> IPv4Address | IPv6Address:
    """An address, which the system writes in hexadecimal, in words of four bytes."""
    data = bytes.fromhex(end.rpartition(":")[0])
    words = [data[at : at + 4] for at in range(0, len(data), 4)]
    found = ip_address(b"".join(w[::-1] if sys.byteorder == "little" else w for w in words))
    return (found.ipv4_mapped or found) if isinstance(found, IPv6Address) else found
