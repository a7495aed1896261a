"""The one place for ipykernel's private parts: messages of widgets while a cell runs.

A cell that waits for ranks blocks the kernel's loop, and with it what the board's buttons say;
ipykernel 7's threads for such messages help only in some versions of it. So a waiting cell reads
the pending messages itself: those of widgets are handled, all others are given back to the loop
in their order, for when the cell is over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_COMMS = ("comm_open", "comm_msg", "comm_close")


def _shell_stream(kernel: Any) -> Any:
    """The stream on which the main thread gets its messages; None where it is not as known."""
    stream = getattr(kernel, "shell_stream", None)
    channel = getattr(kernel, "shell_channel_thread", None)
    if channel is not None:  # ipykernel 7: another thread reads the socket, and passes them on
        pair = getattr(getattr(channel, "manager", None), "_shell_channel_to_main", None)
        stream = getattr(pair, "to_stream", None)
    known = ("socket", "io_loop", "_recv_callback")
    return stream if all(getattr(stream, name, None) is not None for name in known) else None


def widget_messages(kernel: Any) -> Callable[[], None] | None:
    """What handles the pending messages of widgets, for the main thread to call again and again.

    None where the kernel is not built as is known here: buttons then work between cells.
    """
    handlers = getattr(kernel, "shell_handlers", None)
    stream, session = _shell_stream(kernel), getattr(kernel, "session", None)
    if stream is None or session is None or not handlers:
        return None

    def handle() -> None:
        import zmq

        if threading.current_thread() is not threading.main_thread():
            return
        while True:
            try:
                frames = stream.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.ZMQError:
                return
            if not _handled(frames, session, handlers, stream):
                # The callback as it would have been called; what comes later comes after it.
                stream.io_loop.add_callback(stream._recv_callback, frames)

    return handle


def _handled(frames: list[Any], session: Any, handlers: Any, stream: Any) -> bool:
    """Whether it was a widget's message, which is dealt with then."""
    try:
        idents, rest = session.feed_identities(frames, copy=False)
        # A look at the header alone does not count as having seen the message.
        kind = session.deserialize(rest, content=False, copy=False)["header"]["msg_type"]
    except (ValueError, TypeError, KeyError):
        return False  # the loop's to judge
    handler = handlers.get(kind) if kind in _COMMS else None
    if handler is None:
        return False
    try:
        handler(stream, idents, session.deserialize(rest, content=True, copy=False))
    except Exception:  # a page's message must not end the user's cell
        import logging

        logging.getLogger(__name__).warning("a widget's message was not handled", exc_info=True)
    return True
