"""Stores that the user's own code opens: ``TCPStore("host", 29500, 4, is_master=rank == 0)``.

torch connects, and the host waits for its clients, in C++. So the call is made known while it
lasts, as that of `init_process_group` is. Of a PrefixStore the prefix is recorded.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ddp_notebook.model import OWN_STORE, InitArguments
from ddp_notebook.rank.component import Component
from ddp_notebook.rank.main_thread import MainThread
from ddp_notebook.rank.setup.rendezvous import InitCalls, prefixes
from ddp_notebook.rank.setup.sockets import TorchSockets

_MARK = "__ddp_notebook_notes__"
_TAKES = ("host_name", "port", "world_size", "is_master", "timeout")
"""The first arguments of a TCPStore, in torch's order."""
_CONSTRUCTOR = "__init__"
_LIMIT = timedelta(minutes=5)
"""torch's own."""


class OwnStores(Component):
    """Watches the main thread's calls of `TCPStore` outside of `init_process_group`."""

    def __init__(
        self, main_thread: MainThread, init_calls: InitCalls, sockets: TorchSockets
    ) -> None:
        self._main_thread = main_thread
        self._init_calls = init_calls
        self._sockets = sockets

    def attach(self) -> None:
        """Call torch's constructors through functions that record it. Done once."""
        opened, prefixed = dist.TCPStore.__init__, dist.PrefixStore.__init__
        if hasattr(opened, _MARK):
            return

        def opens_store(store: Any, *args: Any, **named: Any) -> None:
            main, calls = self._main_thread, self._init_calls.calls
            # Within a call of init_process_group, or a setup, it is torch's own store, or ours.
            own = not (calls.inside or main.waiting_in)
            arguments = None
            if own and threading.current_thread() is threading.main_thread():
                arguments = _arguments(args, named)
                calls.arguments = arguments or calls.arguments
            # A caller with a shorter timeout expects that no store may answer.
            if arguments is None or (arguments.timeout_s or 0) < 60.0:
                opened(store, *args, **named)
                return
            main.waiting_in = "store"
            self._sockets.group_begins()
            try:
                opened(store, *args, **named)
            finally:
                self._sockets.group_ended()
                main.waiting_in = ""
            main.end_if_aborted()  # it is a stand-in that has answered

        def prefixes_store(store: Any, *args: Any, **named: Any) -> None:
            prefixed(store, *args, **named)
            # torch's object has no attribute for it.
            prefix = next(iter(args), named.get("prefix"))
            if isinstance(prefix, str):
                prefixes[store] = prefix

        setattr(opens_store, _MARK, True)
        setattr(dist.TCPStore, _CONSTRUCTOR, functools.update_wrapper(opens_store, opened))
        setattr(dist.PrefixStore, _CONSTRUCTOR, functools.update_wrapper(prefixes_store, prefixed))


def _arguments(args: Sequence[Any], named: Mapping[str, Any]) -> InitArguments | None:
    """Return what such a call asks for; None if torch will refuse it."""
    given = {**dict(zip(_TAKES, args, strict=False)), **named}
    address, port, timeout = given.get("host_name"), given.get("port"), given.get("timeout", _LIMIT)
    if not (isinstance(address, str) and isinstance(port, int) and isinstance(timeout, timedelta)):
        return None
    size = given.get("world_size")
    return InitArguments(
        OWN_STORE,
        world_size=size if isinstance(size, int) and size > 0 else None,
        master_addr=address,
        master_port=port,
        timeout_s=timeout.total_seconds(),
        hosts_store=bool(given.get("is_master")),
    )
