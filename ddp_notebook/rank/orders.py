"""Takes the session's orders to run something, in the engine's own loop.

They come over a connection to this process's control socket that the session keeps open. Through
ipyparallel's controller and ipykernel's queues an order took most of a short cell's time.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import socket
from collections.abc import Callable
from typing import Any

from ddp_notebook.rank.component import Component
from ddp_notebook.rank.control_socket import first_message


class Orders(Component):
    """Hands each order to `carry_out(name, request)`, on the main thread, one after the other."""

    def __init__(self, carry_out: Callable[[str, Any], None]) -> None:
        self._carry_out = carry_out

    def attach(self) -> None:
        """Have the loop that runs in this thread, the engine's, read orders from now on."""
        self._loop = asyncio.get_running_loop()
        # A loop calls a reader in the context in which it was added: what a cell sets of context
        # variables must be there in the next, and the control socket's thread has none of them.
        self._context = contextvars.copy_context()

    def take(self, connection: socket.socket) -> None:
        """Read orders from `connection`, until the session closes it. From any thread."""
        # The control socket's thread gives it away here, and does not touch it again.
        connection.setblocking(False)
        received = bytearray()

        def read() -> None:
            try:
                piece = connection.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                piece = b""
            if not piece:
                self._loop.remove_reader(connection)
                connection.close()
                return
            received.extend(piece)
            # Each is taken out first: a loop that a cell runs in this one may come by here.
            while message := first_message(received):
                order = json.loads(message)
                self._carry_out(order["order"], order["request"])

        add = self._loop.add_reader
        self._loop.call_soon_threadsafe(add, connection, read, context=self._context)
