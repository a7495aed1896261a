"""Takes the session's orders to run something: on a socket of ours, in the engine's own loop.

Through ipyparallel's controller and ipykernel's queues an order took most of a short cell's time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import zmq
from zmq.eventloop.zmqstream import ZMQStream

from ddp_notebook.rank.component import Component


class OrderSocket:
    """Connected before the engine starts; what comes is kept until the loop reads it."""

    def __init__(self, url: str) -> None:
        self._context = zmq.Context()  # our own: the engine may end its instance before us
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvhwm = 0
        self.socket.identity = str(os.getpid()).encode()
        self.socket.connect(url)

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
        order = json.loads(frames[0])
        self._carry_out(order["order"], order["request"])
