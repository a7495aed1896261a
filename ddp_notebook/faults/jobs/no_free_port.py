"""Rank 0 may use only three ports, and other processes hold them all."""

import os
import socket

import torch
import torch.distributed as dist

FAULTY = os.environ.get("DDP_FAULT") == "1"


def free_port(ports: range) -> int:
    """The first port of a range that can be had."""
    for port in ports:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free port in the range {ports.start}-{ports.stop - 1}")


def three_that_are_held() -> tuple[range, list[socket.socket]]:
    """Three ports in a row, each held by another socket."""
    while True:
        others: list[socket.socket] = []
        first = socket.create_server(("127.0.0.1", 0))
        others.append(first)
        start = first.getsockname()[1]
        try:
            others += [socket.create_server(("127.0.0.1", start + more)) for more in (1, 2)]
        except OSError:
            for other in others:
                other.close()
            continue
        return range(start, start + 3), others


if FAULTY and os.environ["RANK"] == "0":
    ports, others = three_that_are_held()
    os.environ["MASTER_PORT"] = str(free_port(ports))

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
