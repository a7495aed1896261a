"""The machine's own limits: memory copies, a plain TCP socket."""

from __future__ import annotations

import secrets
import socket
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddp_notebook.bench.results import LOOPBACK_TCP
from ddp_notebook.rank.bench import links

_COPY_BYTES = 64 * 2**20
_COPIES = 7
_PINGS = 200
_STREAM_BYTES = 32 * 2**20
_STREAMS = 3
_CHUNK_BYTES = 2**20
_TIMEOUT_S = 5.0
_TOKEN_BYTES = 16


def measure(control: Any, rank: int, device: torch.device) -> list[dict[str, Any]]:
    """The floors, on rank 0; all ranks of the group `control` must call it.

    Each is a JSON object: ``what``, ``latency_us``, ``bandwidth_gb_per_s``, ``source``; 0 for
    what is not known. The other ranks get an empty list.
    """
    floors = []
    if rank == 0:
        floors.append(_memory_copy(device))
        floors += links.links(device.type, _pci_address(device))
    if control.size() > 1 and _all_on_one_network(control, device):
        floors += _loopback(control, rank, device)
    return floors


def _memory_copy(device: torch.device) -> dict[str, Any]:
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times_s = []
    for _ in range(_COPIES):
        _finish(device)
        started = time.perf_counter()
        target.copy_(source)
        _finish(device)
        times_s.append(time.perf_counter() - started)
    return {
        "what": "memory copy" if device.type == "cpu" else "GPU memory copy",
        "latency_us": 0.0,
        "bandwidth_gb_per_s": _COPY_BYTES / min(times_s) / 1e9,
        "source": f"the best of {_COPIES} copies of 64 MiB on rank 0",
    }


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _pci_address(device: torch.device) -> str:
    """The GPU's address on the PCI bus; empty without a GPU, or if not known."""
    if device.type != "cuda":
        return ""
    known: Any = torch.cuda.get_device_properties(device)
    domain, bus, slot = (
        getattr(known, f"pci_{part}_id", None) for part in ("domain", "bus", "device")
    )
    if domain is None or bus is None or slot is None:
        return ""
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def _all_on_one_network(control: Any, device: torch.device) -> bool:
    """True on all ranks if all of them share a loopback interface."""
    where = [socket.gethostname()]
    with suppress(OSError):
        where.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        where.append(str(Path("/proc/thread-self/ns/net").readlink()))
    own = zlib.crc32("".join(where).encode())
    ends = torch.tensor([own, -own], dtype=torch.int64, device=device)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=control)
    return int(ends[0]) == -int(ends[1])


def _loopback(control: Any, rank: int, device: torch.device) -> list[dict[str, Any]]:
    """The round trip of a byte, and a stream one way, between ranks 0 and 1 over a plain socket."""
    words = [0, 0, 0]
    listener = None
    if rank == 0:
        with suppress(OSError):
            listener = socket.create_server(("127.0.0.1", 0))
            words = [listener.getsockname()[1], *(secrets.randbits(62) for _ in range(2))]
    shared = torch.tensor(words, dtype=torch.int64, device=device)
    dist.broadcast(shared, group=control, group_src=0)
    port, *token = (int(word) for word in shared.tolist())
    key = b"".join(word.to_bytes(_TOKEN_BYTES // 2, "big") for word in token)
    floors: list[dict[str, Any]] = []
    with suppress(OSError, TimeoutError):
        if listener is not None:
            with listener:
                floors.append(_serve(listener, key))
        elif rank == 1 and port:
            _answer(port, key)
    dist.barrier(group=control)
    return floors


def _serve(listener: socket.socket, key: bytes) -> dict[str, Any]:
    listener.settimeout(_TIMEOUT_S)
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL) != key:
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
        "latency_us": sorted(trips_s)[_PINGS // 10] / 2 * 1e6,
        "bandwidth_gb_per_s": _STREAM_BYTES / min(streams_s) / 1e9,
        "source": "a plain socket between ranks 0 and 1: half of a good round trip, the best of "
        f"{_STREAMS} streams of 32 MiB",
    }


def _answer(port: int, key: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), _TIMEOUT_S) as connection:
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
