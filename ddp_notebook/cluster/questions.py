"""Asks ranks at their control sockets, all at once, and sends them orders. Needs no session.

`rank/control_socket.py` says what is sent, and why not through ipyparallel.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.model import RankReport, Ranks, codec
from ddp_notebook.rank.calls import (
    Answer,
    CannotAnswer,
    Order,
    Question,
    Reached,
    Request,
    Targets,
    answered,
)
from ddp_notebook.rank.control_socket import MOST_BYTES, connected, first_message, framed

_LISTENS_WITHIN_S = 2.0


def ask(
    sockets: Mapping[int, Path],
    question: Question[Request, Answer],
    request: Request,
    timeout_s: float,
) -> dict[int, Answer | CannotAnswer]:
    """Ask the ranks that listen at `sockets`; omits those that miss `timeout_s`."""
    message = framed({"question": question.name, "about": codec.encode(request)})
    answers: dict[int, Answer | CannotAnswer] = {}
    for rank, data in _exchange(sockets, message, timeout_s).items():
        try:
            content = json.loads(data)
            if "answer" in content:
                answers[rank] = codec.decode(question.answer, content["answer"])
            else:
                answers[rank] = CannotAnswer(str(content.get("error", "")))
        except (RecursionError, ValueError, TypeError, AttributeError) as error:
            answers[rank] = CannotAnswer(f"its answer cannot be read: {error}")
    return answers


def with_reach(
    ranks: Sequence[RankReport],
    ask_ranks: Callable[[Ranks, Targets], Mapping[int, Reached | CannotAnswer]],
) -> tuple[RankReport, ...]:
    """Add to `ranks` the peers that each one reaches, if they connect across hosts.

    Asked in a second step, because only their reports have the address of each rank.
    """
    connecting = [e for e in ranks if e.inside == "process-group" and e.network.listens]
    if len({e.network.loopback for e in connecting}) < 2:
        return tuple(ranks)
    targets = Targets(
        tuple(
            address
            for report in connecting
            for address in report.network.listens
            if not address.startswith(("127.", "::1:"))  # loopback means another host there
        )
    )
    answers = answered(ask_ranks(tuple(report.rank for report in connecting), targets))
    reached = {rank: answer.probes for rank, answer in answers.items()}
    return tuple(
        replace(report, network=replace(report.network, reach=reached.get(report.rank, ())))
        for report in ranks
    )


class OrderSender:
    """Sends orders, over a connection to each process that stays. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: dict[int, socket.socket] = {}
        """By pid, so that a process that replaces another does not get what was meant for that."""

    def send(
        self, sockets: Mapping[int, tuple[int, Path]], order: Order[Request], request: Request
    ) -> Ranks:
        """Send one order to ranks, of pids at sockets; return those that could not be reached."""
        message = framed({"order": order.name, "request": codec.encode(request)})
        left = dict(sockets)
        began_s = time.monotonic()
        while left:
            left = {rank: to for rank, to in left.items() if not self._sent(*to, message)}
            # A process listens as soon as its first call has arrived.
            if time.monotonic() - began_s > scaled_for_load(_LISTENS_WITHIN_S):
                break
            time.sleep(0.002 if left else 0)
        return tuple(left)

    def connect(self, pid: int, path: Path) -> None:
        """Connect to a process before there are orders: a connection outlives the socket's file."""
        if pid not in self._connections:
            self._sent(pid, path, b"")

    def _sent(self, pid: int, path: Path, message: bytes) -> bool:
        with self._lock, contextlib.suppress(OSError):
            connection = self._connections.pop(pid, None)
            if connection is None:
                connection = connected(path)
                connection.settimeout(_LISTENS_WITHIN_S)
                message = framed({"orders": pid}) + message
            try:
                connection.sendall(message)
            except OSError:  # it has ended; or it does not read, and part of the message is sent
                connection.close()
                raise
            self._connections[pid] = connection
            return True
        return False

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            for connection in self._connections.values():
                connection.close()


def _exchange(sockets: Mapping[int, Path], message: bytes, timeout_s: float) -> dict[int, bytes]:
    """Return what each of them answers to `message`, without its length."""
    deadline_s = time.monotonic() + timeout_s
    answers: dict[int, bytes] = {}
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        for rank, path in sockets.items():
            with contextlib.suppress(OSError):  # no process listens there, or its queue is full
                connection = stack.enter_context(connected(path))
                # It does not block: a question is short, and a new connection's buffer takes it
                # whole. Where it does not, the rank counts as one that does not answer.
                if connection.send(message) == len(message):
                    key_data = rank, connection, bytearray()
                    selector.register(connection, selectors.EVENT_READ, key_data)
        left_s = timeout_s
        while selector.get_map() and left_s > 0:
            # What has arrived is read after the deadline too: this process may have got no CPU.
            left_s = max(0.0, deadline_s - time.monotonic())
            for key, _ in selector.select(left_s):
                rank, connection, received = key.data
                try:
                    piece = connection.recv(1 << 16)
                except BlockingIOError:
                    continue
                except OSError:
                    piece = b""  # nothing can follow
                received += piece
                if complete := first_message(received):
                    answers[rank] = complete
                if not piece or complete or len(received) > MOST_BYTES:
                    selector.unregister(key.fileobj)
    return answers
