"""Opening the store and waiting for its keys, so that both can be looked at and given up.

torch's own client waits in C++, deaf to everything but its time-out. So the rank knocks
first, in Python, and hands over to torch when somebody opens.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from ddp_notebook.model import Category, InitArguments, name_ranks
from ddp_notebook.rank import state
from ddp_notebook.rank.inspect import reachability
from ddp_notebook.rank.setup.errors import StageError
from ddp_notebook.rank.setup.store_process import explain, listen

if TYPE_CHECKING:
    from ddp_notebook.rank.setup.stages import Plan

_KNOCK_S = 0.1
_KNOCK_TIMEOUT_S = 1.0
_SLICE_S = 0.25
"""How long to wait for keys before looking whether the wait was given up."""


def open_store(came: InitArguments, plan: Plan) -> dist.Store:
    """The store that this rank comes to. Raises StageError."""
    state.current.waiting_in = "store"
    if came.method == "file":
        return _file_store(came)
    assert came.master_port is not None
    if came.hosts_store:
        return _host(came, came.master_port, plan)
    _await_answer(came.master_addr, came.master_port, came.timeout_s or plan.timeout_s, plan)
    return dist.TCPStore(
        came.master_addr,
        came.master_port,
        None,
        is_master=False,
        timeout=plan.timeout,
        wait_for_workers=False,
    )


def _file_store(came: InitArguments) -> dist.Store:
    """The file, which this rank must be able to write."""
    try:
        with Path(came.path).open("ab"):
            pass
    except OSError as error:
        raise StageError(
            f"The rendezvous file {came.path} cannot be written: {error.strerror}.",
            "Use a folder that every rank may write, or --init-method env.",
            Category.FILESYSTEM.value,
        ) from None
    return dist.FileStore(came.path, came.world_size or 1)


def _host(came: InitArguments, port: int, plan: Plan) -> dist.Store:
    """Host the store here, as rank 0 of a plain script does; on the address asked for alone."""
    _await_resolver(came.master_addr)
    try:
        listener = listen(came.master_addr, port)
    except OSError as error:
        why = explain(error, came.master_addr, port)
        category = why.category or Category.UNREACHABLE_MASTER.value
        raise StageError(why.cause, why.remedy, category) from None
    return dist.TCPStore(
        came.master_addr,
        port,
        None,
        is_master=True,
        timeout=plan.timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _await_answer(host: str, port: int, timeout_s: float, plan: Plan) -> None:
    """Knock until somebody opens. Raises StageError when given up or after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while (why := _knock(host, port)) is not None:
        state.current.doing = f"store: {why}"
        if state.current.give_up.wait(_KNOCK_S):
            raise StageError("given up", "%ddp_init")
        if time.monotonic() > deadline and not plan.patient:
            raise StageError(
                f"The store at {host}:{port} did not answer within {timeout_s:g} s: {why}.",
                "%ddp_why compares this rank's MASTER_ADDR and MASTER_PORT with the others'",
            )
    state.current.doing = ""


def _await_resolver(host: str) -> None:
    """Wait until the resolver has said what `host` is, or is not. Raises StageError if given up."""
    while not reachability.lookup(host):
        state.current.doing = f"store: the resolver has not answered what {host} is"
        if state.current.give_up.is_set():
            raise StageError("given up", "%ddp_init")
    state.current.doing = ""


def _knock(host: str, port: int) -> str | None:
    """None when somebody opens at `host`:`port`, else why not."""
    found = reachability.lookup(host)
    if not found:
        return f"the resolver has not answered what {host} is"
    if isinstance(found, str):
        return f"{host} does not resolve ({found})"
    for address in found:
        try:
            socket.create_connection((address, port), _KNOCK_TIMEOUT_S).close()
            return None
        except OSError as error:
            reason = error.strerror or "no answer"
    return f"nobody opens at {host}:{port} ({reason.lower()})"


def await_keys(store: dist.Store, keys: list[str], plan: Plan) -> None:
    """Wait until all `keys` are in the store. Raises StageError when given up or too late."""
    state.current.waiting_in = "rendezvous"
    deadline = time.monotonic() + plan.timeout.total_seconds()
    slice_s = timedelta(seconds=_SLICE_S)
    while True:
        try:
            store.wait(keys, slice_s)
            return
        except RuntimeError:
            absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if not absent:
            return
        who = name_ranks(absent)
        state.current.doing = f"rendezvous: waits for {who} to join (key join/{absent[0]})"
        if state.current.give_up.is_set():
            raise StageError("given up", "%ddp_init")
        if time.monotonic() > deadline:
            raise StageError(
                f"{who.capitalize()} did not join within {plan.timeout_s:g} s.",
                "%ddp_status shows where they are; %ddp_init --timeout allows more time",
            )
