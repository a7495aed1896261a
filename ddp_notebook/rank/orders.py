"""Takes the session's orders to run something: on a socket of ours, in the engine's own loop.

Through ipyparallel's controller and ipykernel's queues an order took most of a short cell's time.
A message is two frames, as an event sender's is: the signature of the second, and JSON.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import zmq
from zmq.eventloop.zmqstream import ZMQStream

from ddp_notebook.rank.component import Component
from ddp_notebook.rank.events import signature


class OrderSocket:
    """Connected before the engine starts; what comes is kept until the loop reads it."""

    def __init__(self, url: str, key: str) -> None:
        self._key = bytes.fromhex(key)
        self._context = zmq.Context()  # our own: the engine may end its instance before us
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvhwm = 0
        self.socket.identity = str(os.getpid()).encode()
        self.socket.connect(url)

    def read(self, frames: list[bytes]) -> Mapping[str, Any] | None:
        """The order in a message; None for one that the session did not sign."""
        if len(frames) != 2 or not hmac.compare_digest(signature(frames[1], self._key), frames[0]):
            return None
        order: Mapping[str, Any] = json.loads(frames[1])
        return order

    def close(self) -> None:
        """Read no more; a rank's own ends with its process."""
        self.socket.close()
        self._context.term()


class Orders(Component):
    """Hands each order to `carry_out(name, request)`, on the main thread, one after the other."""

    def __init__(self, socket: OrderSocket, carry_out: Callable[[str, Any], None]) -> None:
        self._socket = socket
        self._carry_out = carry_out

    def attach(self) -> None:
        """Have the loop that runs in this thread, the engine's, read the socket from now on."""
        self._stream = ZMQStream(self._socket.socket)
        self._stream.on_recv(self._take)

    def _take(self, frames: list[bytes]) -> None:
        order = self._socket.read(frames)
        if order is not None:
            self._carry_out(order["order"], order["request"])
