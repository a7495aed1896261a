"""ipykernel's private parts: what is used of them is there, and where it is not nothing is done."""

from __future__ import annotations

from types import SimpleNamespace

import zmq
from ipykernel.kernelbase import Kernel
from jupyter_client.session import Session

from ddp_notebook.board.kernel_messages import widget_messages


def test_a_kernel_that_is_built_otherwise_is_left_alone() -> None:
    assert widget_messages(None) is None
    assert widget_messages(SimpleNamespace()) is None
    channel = SimpleNamespace(manager=SimpleNamespace())
    assert widget_messages(SimpleNamespace(shell_channel_thread=channel, session=1)) is None


def test_what_is_used_of_ipykernel_is_there() -> None:
    for name in ("_publish_status", "get_parent"):
        assert callable(getattr(Kernel, name))


class Loop:
    """A loop that does not run; keeps what it is to call."""

    def __init__(self) -> None:
        self.later: list[tuple[object, ...]] = []

    def add_callback(self, callback: object, *arguments: object) -> None:
        self.later.append((callback, *arguments))


def test_widget_messages_are_handled_and_others_given_back_in_order() -> None:
    context = zmq.Context()
    page, here = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    here.bind("inproc://shell")
    page.connect("inproc://shell")
    session, loop, heard = Session(key=b"k"), Loop(), []

    def fail(*_: object) -> None:
        raise ValueError("a page's nonsense")

    handlers = {
        "comm_msg": lambda _, __, message: heard.append(message["content"]["n"]),
        "comm_close": fail,
    }
    callback = object()
    kernel = SimpleNamespace(
        shell_stream=SimpleNamespace(socket=here, io_loop=loop, _recv_callback=callback),
        session=session,
        shell_handlers=handlers,
        get_parent=lambda _: {},
        _publish_status=lambda *_, **__: None,
    )
    handle = widget_messages(kernel)
    assert handle is not None
    try:
        kinds = ["execute_request", "comm_msg", "comm_close", "execute_request", "comm_msg"]
        for n, kind in enumerate(kinds):
            session.send(page, kind, {"n": n}, ident=b"page")
        page.send_multipart([b"no message at all"])
        handle()
        assert heard == [1, 4]
        given_back = [arguments for what, *arguments in loop.later if what is callback]
        assert len(given_back) == 3 == len(loop.later)
        numbers = []
        for (frames,) in given_back[:2]:
            _, rest = session.feed_identities(frames, copy=False)
            numbers.append(session.deserialize(rest, copy=False)["content"]["n"])
        assert numbers == [0, 3]
        handle()
        assert heard == [1, 4]
    finally:
        for socket in (page, here):
            socket.close(0)
        context.term()
