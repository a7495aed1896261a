"""Sends orders to ranks, each to its process, on a socket that only this user can reach."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zmq

from ddp_notebook.cluster.event_receiver import bind
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.model import Ranks, codec
from ddp_notebook.rank.calls import Order, Request
from ddp_notebook.rank.events import signature

_CONNECTED_WITHIN_S = 2.0
_POLL_S = 0.002


class OrderSender:
    """Thread-safe. A rank is identified by its pid: a replaced process receives nothing."""

    def __init__(self, folder: Path, key: str) -> None:
        self._key = bytes.fromhex(key)
        self._lock = threading.Lock()
        self._context: Any = zmq.Context()
        self._socket: Any = self._context.socket(zmq.ROUTER)
        self._socket.router_mandatory = True
        self._socket.sndhwm = 0
        self._socket.linger = 0
        self.url = bind(self._socket, folder / "orders.sock")

    def send(self, pids: Mapping[int, int], order: Order[Request], request: Request) -> Ranks:
        """Send one order to ranks, by their pids; returns those that could not be reached."""
        wire = codec.dumps({"order": order.name, "request": codec.encode(request)}).encode()
        message = [signature(wire, self._key), wire]
        left = dict(pids)
        began_s = time.monotonic()
        while left:
            left = {rank: pid for rank, pid in left.items() if not self._sent(pid, message)}
            # A process connects when it starts, long before it accepts calls.
            waited_s = time.monotonic() - began_s
            if self._socket.closed or waited_s > scaled_for_load(_CONNECTED_WITHIN_S):
                break
            time.sleep(_POLL_S if left else 0)
        return tuple(left)

    def _sent(self, pid: int, message: list[bytes]) -> bool:
        with self._lock, contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart([str(pid).encode(), *message], zmq.NOBLOCK)
            return True
        return False

    def close(self) -> None:
        """Close the sender."""
        with self._lock:
            self._socket.close(linger=0)
        self._context.term()
