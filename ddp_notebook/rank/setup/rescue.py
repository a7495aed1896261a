"""Unblocks the main thread when it hangs inside torch's setup or a collective.

gloo and TCPStore end a blocked call with an exception when one of their connections is shut down;
aborting the group, timeouts and signals have no effect. Without a connection to shut down, torch
waits for one, or for a rendezvous file: then it gets a connection that ends, or cannot open the
file. NCCL does not look at its connections; there the communicators are aborted.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import time
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

from ddp_notebook.model import OWN_STORE, InitArguments
from ddp_notebook.rank import torch_private
from ddp_notebook.rank.calls import Freed
from ddp_notebook.rank.component import Component
from ddp_notebook.rank.inspect import data_workers, frames
from ddp_notebook.rank.main_thread import MainThread
from ddp_notebook.rank.setup.listening import host_store
from ddp_notebook.rank.setup.reachability import Resolver
from ddp_notebook.rank.setup.rendezvous import Calls, InitCalls
from ddp_notebook.rank.setup.sockets import TorchSockets


class Rescue(Component):
    """Called on the thread that answers questions, while the main thread is blocked."""

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
        self._file_withheld: Calls | None = None
        """The calls for which the rendezvous file was briefly made impossible to open."""

    def setup_begins(self) -> None:
        """Close the stores that `_stand_in_for_the_store` opened."""
        self._stand_ins.clear()

    def free(self) -> Freed:
        """Shut down torch's connections; without any, stand in for what it waits for.

        It breaks the process group, and is harmless otherwise if nothing is blocked. Workers of the
        DataLoader in which the main thread waits are ended.
        """
        # Before anything ends: by this flag the main thread and `Observer.failed` know a collective
        # that was freed from one that torch gave up.
        self._main_thread.abort.set()
        data_workers.end(frames.frames_of(frames.main_frame()))
        torch_private.abort_nccl()
        closed = self._sockets.shut_down()
        calls = self._init_calls.calls
        opens = calls.arguments.method == OWN_STORE and self._main_thread.waiting_in == "store"
        if not closed and (calls.inside or opens):
            self._stand_in(calls)
        return Freed(closed)

    def _stand_in(self, calls: Calls) -> None:
        """End what `init_process_group`, or a store of the user's own, waits for."""
        in_file = calls.inside and calls.arguments.method == "file"
        if in_file and self._file_withheld is not calls:
            self._file_withheld = calls  # once: gloo must not get connections meanwhile
            _let_no_file_be_opened()
            return
        # The connections that gloo waits for are made, and ended. A peer that connects sends the
        # number of the connection first.
        listening = self._sockets.listening() if calls.inside else []
        for address in listening:
            host, _, port = address.rpartition(":")
            # The most of gloo's connections to end: those of a group of this many ranks.
            for number in range(64 if port != str(calls.arguments.master_port) else 0):
                with (
                    contextlib.suppress(OSError),
                    socket.create_connection((host, int(port)), 0.2) as peer,
                ):
                    peer.sendall(struct.pack("q", number))
        if not listening:
            self._stand_in_for_the_store(calls.arguments)

    def _stand_in_for_the_store(self, arguments: InitArguments) -> None:
        """Open a store for a main thread that polls a port where no process listens.

        It connects and waits on that connection, which the next `free` ends.
        """
        host, port = arguments.master_addr, arguments.master_port
        # Not where the name does not resolve, or not yet: torch does not get that far.
        if port and not arguments.hosts_store and not isinstance(self._resolver.lookup(host), str):
            with contextlib.suppress(OSError):
                self._stand_ins.append(host_store(host, port, timedelta(seconds=5)))


def _let_no_file_be_opened() -> None:
    """Briefly: torch polls a rendezvous file, and an error when it opens the file ends that.

    All file descriptors are used up. A limit of 0 would do the same, but makes `poll` fail.
    """
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    try:
        highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, most))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(taken[0]))
        # torch's FileStore opens its file every 10 ms.
        time.sleep(0.05)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
        for number in taken:
            os.close(number)
