"""ipykernel's private parts, all of them: a page's messages while a cell runs.

A cell that waits for ranks blocks the kernel's loop, and with it what the board's buttons say;
ipykernel 7's threads for such messages help only in some versions of it. So a waiting cell reads
the pending messages itself: those of widgets are handled, and the questions of a page that was
reloaded, so that its board comes back. All others are given back to the loop in their order, for
when the cell is over.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
from collections.abc import Callable
from typing import Any

_COMMS = ("comm_open", "comm_msg", "comm_close")
_QUESTIONS = ("kernel_info_request", "comm_info_request")


def widget_messages(kernel: Any) -> Callable[[], None] | None:
    """Return a function that handles pending messages of widgets; the main thread calls it often.

    None where the kernel is not built as is known here: buttons then work between cells.
    """
    stream, session = _shell_stream(kernel), getattr(kernel, "session", None)
    needs = ("shell_handlers", "get_parent", "_publish_status")
    if stream is None or session is None or not all(hasattr(kernel, name) for name in needs):
        return None

    def handle() -> None:
        import zmq

        if threading.current_thread() is not threading.main_thread():
            return
        while True:
            try:
                # Only the main thread may use this socket, and it is the one that waits in the
                # cell: so nobody else reads it now.
                frames = stream.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.ZMQError:
                return
            if not _handled(frames, kernel):
                # The callback as it would have been called; what comes later comes after it.
                stream.io_loop.add_callback(stream._recv_callback, frames)

    return handle


def _shell_stream(kernel: Any) -> Any:
    """The stream on which the main thread gets its messages; None where it is not as known."""
    stream = getattr(kernel, "shell_stream", None)
    if getattr(kernel, "shell_channel_thread", None) is not None:
        # ipykernel 7: another thread reads the socket, and passes messages on.
        manager = getattr(kernel.shell_channel_thread, "manager", None)
        stream = getattr(getattr(manager, "_shell_channel_to_main", None), "to_stream", None)
        if not hasattr(manager, "get_subshell_to_shell_channel_socket"):
            return None
    known = ("socket", "io_loop", "_recv_callback")
    return stream if all(getattr(stream, name, None) is not None for name in known) else None


def _handled(frames: list[Any], kernel: Any) -> bool:
    """Handle a message if that can be done now; return True if so."""
    import zmq

    session = kernel.session
    try:
        idents, rest = session.feed_identities(frames, copy=False)
        # A look at the header alone does not count as having seen the message.
        kind = session.deserialize(rest, content=False, copy=False)["header"]["msg_type"]
    except (ValueError, TypeError, KeyError):
        return False  # the loop's to judge
    # An execute request stays for later: run here, its cell would run within the cell that waits.
    if kind not in (*_COMMS, *_QUESTIONS):
        return False
    try:
        message = session.deserialize(rest, content=True, copy=False)
        socket = kernel.shell_stream
        if getattr(kernel, "shell_channel_thread", None) is not None:  # ipykernel 7
            manager = kernel.shell_channel_thread.manager
            socket = manager.get_subshell_to_shell_channel_socket(None)
        if kind in _COMMS:
            kernel.shell_handlers[kind](socket, idents, message)
            return True
        # Who asks takes it for answered when the kernel says that it is idle.
        kernel._publish_status("busy", "shell", parent=message)
        reply = kernel.shell_handlers[kind](socket, idents, message)
        if inspect.iscoroutine(reply):
            with contextlib.suppress(StopIteration):  # it waits for nothing
                reply.send(None)
                reply.close()
                raise RuntimeError("the kernel waits for something to answer this")
        if hasattr(socket, "flush"):  # a stream, whose loop does not run now
            socket.flush(zmq.POLLOUT)
        kernel._publish_status("idle", "shell", parent=message)
        parent = kernel.get_parent("shell")
        kernel._publish_status("busy", "shell", parent=parent)  # the cell still is
    except Exception:  # a page's message must not end the user's cell
        logging.getLogger(__name__).warning("a page's message was not handled", exc_info=True)
    return True
