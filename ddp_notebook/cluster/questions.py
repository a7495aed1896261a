"""Asks processes questions at their unix sockets, concurrently; needs no session."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_notebook.model import codec
from ddp_notebook.rank.calls import Answer, CannotAnswer, Question, Request
from ddp_notebook.rank.control_socket import LENGTH, MOST_BYTES, framed, is_mine, reachable


def ask(
    sockets: Mapping[int, Path],
    question: Question[Request, Answer],
    request: Request,
    timeout_s: float,
) -> dict[int, Answer | CannotAnswer]:
    """Ask the ranks that listen at `sockets`; omits those that miss `timeout_s`."""
    message = framed({"question": question.name, "about": codec.encode(request)})
    answers = {}
    for rank, data in _exchange(sockets, message, timeout_s).items():
        answer: Answer | CannotAnswer = _read(question, data)
        answers[rank] = answer
    return answers


def _read(question: Question[Request, Answer], data: bytes) -> Answer | CannotAnswer:
    try:
        content = json.loads(data)
        if "answer" not in content:
            return CannotAnswer(str(content.get("error", "")))
        return codec.decode(question.answer, content["answer"])
    except (RecursionError, codec.DecodeError, ValueError, TypeError, AttributeError) as error:
        return CannotAnswer(f"its answer cannot be read: {error}")


def _exchange(sockets: Mapping[int, Path], message: bytes, timeout_s: float) -> dict[int, bytes]:
    """Return what each of them answers to `message`, without its length."""
    deadline_s = time.monotonic() + timeout_s
    answers: dict[int, bytes] = {}
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        for rank, path in sockets.items():
            connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            with contextlib.suppress(OSError):  # no process listens there, or its queue is full
                connection.setblocking(False)
                with reachable(path) as address:
                    connection.connect(address)
                if is_mine(connection) and connection.send(message) == len(message):
                    selector.register(connection, selectors.EVENT_READ, (rank, bytearray()))
        left_s = timeout_s
        while selector.get_map() and left_s > 0:
            # What has arrived is read after the deadline too: this process may have got no CPU.
            left_s = max(0.0, deadline_s - time.monotonic())
            for key, _ in selector.select(left_s):
                rank, read = key.data
                if _is_over(key.fileobj, read):
                    selector.unregister(key.fileobj)
                    if complete := _complete(read):
                        answers[rank] = complete
    return answers


def _is_over(connection: Any, read: bytearray) -> bool:
    """Read more; True at the end of the message."""
    try:
        piece = connection.recv(1 << 16)
    except BlockingIOError:
        return False
    except OSError:
        return True
    read += piece
    return not piece or len(read) > MOST_BYTES or bool(_complete(read))


def _complete(read: bytearray) -> bytes:
    """Return the message, as soon as all of it was read; nothing before."""
    if len(read) < LENGTH.size:
        return b""
    (size,) = LENGTH.unpack_from(read)
    return bytes(read[LENGTH.size :]) if len(read) == LENGTH.size + size else b""
