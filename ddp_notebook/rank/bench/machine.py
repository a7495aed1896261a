"""What the machine gives a benchmark: free memory, CPU time of this process and its host, floors.

Floors are the machine's own limits, measured in the same run: copies in memory, a plain TCP socket.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ddp_notebook.bench.result import LOOPBACK_TCP
from ddp_notebook.launch.out_of_memory import container_memory

_PINGS = 200
_STREAM_BYTES = 32 * 2**20
_STREAMS = 3
_CHUNK_BYTES = 2**20
_KEY_BYTES = 16


def free_bytes(device: torch.device) -> int:
    """Bytes that are free on `device`; on a CPU, those of its host and the rank's container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available, limit = psutil.virtual_memory().available, container_memory()
    return int(available if limit is None else min(available, limit.left))


# -- load --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Meter:
    """The clocks of this process and its host at one moment, in seconds."""

    clock_s: float
    own_s: float
    host_s: float | None
    """Busy time of all the cores this process may use; None if not known."""

    @classmethod
    def read(cls) -> Meter:
        """The present moment."""
        return cls(time.monotonic(), time.process_time(), busy_s(Path("/proc/stat")))

    def until(self, end: Meter) -> dict[str, Any]:
        """The times from this moment to `end`: a JSON object, None for what is not known."""
        known = self.host_s is not None and end.host_s is not None
        return {
            "host": socket.gethostname(),
            "seconds": end.clock_s - self.clock_s,
            "cpu_s": end.own_s - self.own_s,
            "host_cpu_s": (end.host_s or 0) - (self.host_s or 0) if known else None,
        }


def busy_s(stat: Path, cores: frozenset[int] | None = None) -> float | None:
    """CPU seconds that `cores` (those this process may use) were busy since the host was booted.

    None if not known.
    """
    try:
        wanted = frozenset(os.sched_getaffinity(0)) if cores is None else cores
        ticks, known = 0, False
        for line in stat.read_text().splitlines():
            name, *columns = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in wanted:
                # user, nice, system, irq, softirq, steal; neither idle nor iowait: proc_stat(5)
                ticks += sum(int(columns[c]) for c in (0, 1, 2, 5, 6, 7))
                known = True
        return ticks / os.sysconf("SC_CLK_TCK") if known else None
    except (OSError, ValueError, IndexError, AttributeError):
        return None


# -- floors ------------------------------------------------------------------------------


def floors(control: Any, device: torch.device) -> list[dict[str, Any]]:
    """The floors, on rank 0; all ranks of the group `control` must call it.

    Each is a JSON object: ``what``, ``latency_us``, ``bandwidth_gb_per_s``, ``source``; 0 for
    what is not known. The other ranks get an empty list.
    """
    found = [_memory_copy(device)] if control.rank() == 0 else []
    if control.size() > 1 and _all_on_one_network(control, device):
        found += _loopback(control, device)
    return found


def _memory_copy(device: torch.device) -> dict[str, Any]:
    source = torch.zeros(64 * 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times_s = []
    for _ in range(7):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times_s.append(time.perf_counter() - started)
    return {
        "what": "memory copy" if device.type == "cpu" else "GPU memory copy",
        "latency_us": 0.0,
        "bandwidth_gb_per_s": source.nbytes / min(times_s) / 1e9,
        "source": "the best of 7 copies of 64 MiB on rank 0",
    }


def _all_on_one_network(control: Any, device: torch.device) -> bool:
    """True on all ranks if all of them share a loopback interface."""
    where = [socket.gethostname()]
    with suppress(OSError):
        where.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        where.append(str(Path("/proc/thread-self/ns/net").readlink()))
    own = zlib.crc32("".join(where).encode())
    # The largest and the smallest of all ranks' numbers at once: they are equal if all are.
    ends = torch.tensor([own, -own], dtype=torch.int64, device=device)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=control)
    return int(ends[0]) == -int(ends[1])


def _loopback(control: Any, device: torch.device) -> list[dict[str, Any]]:
    """The round trip of a byte, and a stream one way, between ranks 0 and 1 over a plain socket.

    Whoever listens on a port of this host is reached by anybody on it: rank 1 sends a key that it
    got by a broadcast, and another caller is hung up on.
    """
    words = [0, 0, 0]
    listener = None
    if control.rank() == 0:
        with suppress(OSError):
            listener = socket.create_server(("127.0.0.1", 0))
            words = [listener.getsockname()[1], *(secrets.randbits(62) for _ in range(2))]
    shared = torch.tensor(words, dtype=torch.int64, device=device)
    dist.broadcast(shared, group=control, group_src=0)
    port, *token = (int(word) for word in shared.tolist())
    key = b"".join(word.to_bytes(_KEY_BYTES // 2, "big") for word in token)
    found: list[dict[str, Any]] = []
    with suppress(OSError, TimeoutError):
        if listener is not None:
            with listener:
                found.append(_time_socket(listener, key))
        elif control.rank() == 1 and port:
            _answer(port, key)
    dist.barrier(group=control)
    return found


def _time_socket(listener: socket.socket, key: bytes) -> dict[str, Any]:
    listener.settimeout(5.0)
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(5.0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if connection.recv(_KEY_BYTES, socket.MSG_WAITALL) != key:
            raise ConnectionError("somebody else")
        trips_s = []
        for _ in range(_PINGS):
            started = time.perf_counter()
            connection.sendall(b"p")
            connection.recv(1)
            trips_s.append(time.perf_counter() - started)
        chunk = bytes(_CHUNK_BYTES)
        streams_s = []
        for _ in range(_STREAMS):
            started = time.perf_counter()
            for _ in range(_STREAM_BYTES // _CHUNK_BYTES):
                connection.sendall(chunk)
            connection.recv(1)
            streams_s.append(time.perf_counter() - started)
    return {
        "what": LOOPBACK_TCP,
        # Half of a good round trip: the tenth percentile, which no other process has disturbed.
        "latency_us": sorted(trips_s)[_PINGS // 10] / 2 * 1e6,
        "bandwidth_gb_per_s": _STREAM_BYTES / min(streams_s) / 1e9,
        "source": "a plain socket between ranks 0 and 1: half of a good round trip, the best of "
        f"{_STREAMS} streams of 32 MiB",
    }


def _answer(port: int, key: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), 5.0) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(key)
        for _ in range(_PINGS):
            connection.recv(1)
            connection.sendall(b"p")
        room = bytearray(_CHUNK_BYTES)
        for _ in range(_STREAMS):
            left = _STREAM_BYTES
            while left > 0 and (count := connection.recv_into(room)):
                left -= count
            connection.sendall(b"d")
