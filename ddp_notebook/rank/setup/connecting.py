"""Opening the store and waiting for its keys, so that both can be looked at and aborted.

torch's client blocks in C++ until its timeout, so the rank first polls the port from Python and
calls torch once a connection succeeds.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from ddp_notebook.model import Category, InitArguments, name_ranks
from ddp_notebook.rank.calls import SetUpPlan
from ddp_notebook.rank.main_thread import MainThread
from ddp_notebook.rank.setup.errors import StageError
from ddp_notebook.rank.setup.listening import explain, host_store
from ddp_notebook.rank.setup.reachability import Resolver


class StoreClient:
    """Opens the store of a setup, and waits for what other ranks write into it."""

    def __init__(self, main_thread: MainThread, resolver: Resolver) -> None:
        self._main_thread = main_thread
        self._resolver = resolver

    def open_store(self, arguments: InitArguments, plan: SetUpPlan) -> dist.Store:
        """Open the store that this rank's arguments name. Raises StageError."""
        main = self._main_thread
        main.waiting_in = "store"
        if arguments.method == "file":
            try:
                Path(arguments.path).open("ab").close()
            except OSError as error:
                raise StageError(
                    f"The rendezvous file {arguments.path} cannot be written: {error.strerror}.",
                    "Use a folder that every rank may write, or --init-method env.",
                    Category.FILESYSTEM.value,
                ) from None
            return dist.FileStore(arguments.path, arguments.world_size or 1)
        host, port = arguments.master_addr, arguments.master_port
        assert port is not None
        if arguments.hosts_store:
            # As rank 0 of a plain script does; only on the requested address.
            while not self._resolver.lookup(host):
                main.doing = f"store: the resolver has not answered what {host} is"
                if main.abort.is_set():
                    raise StageError("aborted", "%ddp_init")
            main.doing = ""
            try:
                return host_store(host, port, plan.timeout)
            except OSError as error:
                why = explain(error, host, port)
                category = why.category or Category.UNREACHABLE_MASTER.value
                raise StageError(why.cause, why.remedy, category) from None
        self._await_listener(host, port, arguments.timeout_s or plan.timeout_s, plan)
        return dist.TCPStore(
            host, port, None, is_master=False, timeout=plan.timeout, wait_for_workers=False
        )

    def _await_listener(self, host: str, port: int, timeout_s: float, plan: SetUpPlan) -> None:
        """Poll until a connection succeeds. Raises StageError when aborted or after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            addresses = self._resolver.lookup(host)
            if not addresses:
                why = f"the resolver has not answered what {host} is"
            elif isinstance(addresses, str):
                why = f"{host} does not resolve ({addresses})"
            else:
                for address in addresses:
                    try:
                        socket.create_connection((address, port), 1.0).close()
                        self._main_thread.doing = ""
                        return
                    except OSError as error:
                        reason = error.strerror or "no answer"
                why = f"nothing answers at {host}:{port} ({reason.lower()})"
            self._main_thread.doing = f"store: {why}"
            if self._main_thread.abort.wait(0.1):
                raise StageError("aborted", "%ddp_init")
            if time.monotonic() > deadline and not plan.patient:
                raise StageError(
                    f"The store at {host}:{port} did not answer within {timeout_s:g} s: {why}.",
                    "Compare MASTER_ADDR and MASTER_PORT of all ranks: %ddp_why",
                )

    def await_keys(self, store: dist.Store, keys: list[str], plan: SetUpPlan) -> None:
        """Wait until all `keys` are in the store. Raises StageError when aborted or too late."""
        self._main_thread.waiting_in = "rendezvous"
        deadline = time.monotonic() + plan.timeout.total_seconds()
        # How long to wait for keys before checking whether the wait was aborted.
        slice_s = timedelta(seconds=0.25)
        while True:
            try:
                store.wait(keys, slice_s)
                return
            except RuntimeError:
                absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
            if not absent:
                return
            who = name_ranks(absent)
            self._main_thread.doing = f"rendezvous: waits for {who} to join (key join/{absent[0]})"
            if self._main_thread.abort.is_set():
                raise StageError("aborted", "%ddp_init")
            if time.monotonic() > deadline:
                raise StageError(
                    f"{who.capitalize()} did not join within {plan.timeout_s:g} s.",
                    "See where the ranks are: %ddp_status. Allow more time: %ddp_init --timeout 60",
                )
