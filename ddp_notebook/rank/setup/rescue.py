"""Frees the main thread when it is blocked inside torch's set-up or a gloo collective.

gloo and TCPStore end a blocked call with an exception when a connection of theirs is shut
down; nothing else does that (aborting the group, time-outs and signals have no effect).
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import TCPStore

from ddp_notebook.rank.calls import Freed
from ddp_notebook.rank.component import Component
from ddp_notebook.rank.inspect import data_workers, frames, host
from ddp_notebook.rank.inspect.reachability import Resolver
from ddp_notebook.rank.main_thread import MainThread
from ddp_notebook.rank.setup.rendezvous import InitCalls
from ddp_notebook.rank.setup.sockets import TorchSockets
from ddp_notebook.rank.setup.store_process import listen


class Rescue(Component):
    """Called on the control thread, while the main thread is blocked."""

    def __init__(
        self,
        main_thread: MainThread,
        init_calls: InitCalls,
        sockets: TorchSockets,
        resolver: Resolver,
    ) -> None:
        self._main_thread = main_thread
        self._init_calls = init_calls
        self._sockets = sockets
        self._resolver = resolver
        self._stand_ins: list[TCPStore] = []

    def setup_begins(self) -> None:
        """Take away the stores that `_stand_in_for_the_store` opened."""
        self._stand_ins.clear()

    def free(self) -> Freed:
        """Shut down torch's connections; how many, and whether a stand-in store was needed.

        Harmless when nothing is blocked, but for the process group: it is broken after it.
        Workers of the DataLoader in which the main thread is are ended.
        """
        self._main_thread.abort.set()
        data_workers.end(frames.frames_of(frames.main_frame()))
        closed = self._sockets.shut_down()
        stood_in = not closed and host.as_main(self._stand_in_for_the_store)
        return Freed(closed, stood_in)

    def _stand_in_for_the_store(self) -> bool:
        """Let a main thread that polls a port where nobody listens find a store there.

        It connects, goes on to wait on that connection, and the next `free` ends that.
        """
        calls = self._init_calls.calls
        arguments = calls.arguments
        if not calls.inside or not arguments.master_port or arguments.hosts_store:
            return False
        if isinstance(self._resolver.lookup(arguments.master_addr), str):
            return False  # there is no such host, or not yet
        try:
            listener = listen(arguments.master_addr, arguments.master_port)
        except OSError:
            return False
        self._stand_ins.append(
            TCPStore(
                arguments.master_addr,
                arguments.master_port,
                None,
                is_master=True,
                timeout=timedelta(seconds=5),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        )
        return True
