"""Records each call of `init_process_group` on this rank: its arguments, and whether it returned.

The call itself is torch's own, except for the wait for a MASTER_ADDR that does not resolve yet, or
for the folder of a file, which could not be aborted in torch. If recording fails, the user's call
proceeds.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import os
import re
import socket
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ddp_notebook import files
from ddp_notebook.model import PRIVATE_STORE, InitArguments, cut
from ddp_notebook.rank.component import Component, Run
from ddp_notebook.rank.inspect import process
from ddp_notebook.rank.main_thread import Aborted, MainThread
from ddp_notebook.rank.setup.reachability import Resolver
from ddp_notebook.rank.setup.sockets import TorchSockets

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MARK = "__ddp_notebook_notes__"
_ASK_AGAIN_S = 0.2
_LONGEST_PREFIX = 60
_FILE_WITHIN_S = 300.0
"""How long torch tries to open a rendezvous file."""


@dataclass
class Calls:
    """The calls of one run: a cell, a script, a setup."""

    entered: int = 0
    returned: int = 0
    arguments: InitArguments = field(default_factory=InitArguments)
    """The arguments of the last call."""
    inside: bool = False
    called_ns: int = 0
    """When the last call began, by CLOCK_MONOTONIC."""
    host: str = ""
    """The name and the network (see `inspect.process`) of the host of the call."""
    network: str = ""


class InitCalls(Component):
    """Watches `init_process_group`. `calls` are those of the current or last run."""

    def __init__(self, main_thread: MainThread, sockets: TorchSockets, resolver: Resolver) -> None:
        self._main_thread = main_thread
        self._sockets = sockets
        self._resolver = resolver
        self.calls = Calls()
        self.before_call: Callable[[InitArguments], None] = lambda _: None
        """Called with the arguments of each call before it is recorded."""
        self.keeps: Callable[[InitArguments], bool] = lambda _: False
        """True if a call on a rank that has a group keeps that one. May raise."""

    def attach(self) -> None:
        """Record torch's `init_process_group`, under both of its names."""
        torchs = distributed_c10d.init_process_group
        if hasattr(torchs, _MARK):
            return
        signature = inspect.signature(torchs)

        @functools.wraps(torchs)
        def init_process_group(*args: Any, **options: Any) -> None:
            arguments, read = InitArguments(), False
            with contextlib.suppress(Exception):  # torch itself says what is wrong with a call
                bound = signature.bind(*args, **options)
                bound.apply_defaults()
                arguments, read = arguments_of(bound.arguments), True
            if read and dist.is_initialized() and self.keeps(arguments):
                return
            if read:
                with contextlib.suppress(Exception):
                    self.before_call(arguments)
                    self.enter(arguments)
            calls = self.calls
            try:
                if not dist.is_initialized():
                    self._await_place(arguments)
                torchs(*args, **options)
                # While torch waited, a run or a setup that began may have put others in their
                # place: then what returns now is of the past.
                if calls is self.calls:
                    self.leave()
            finally:
                calls.inside = False

        setattr(init_process_group, _MARK, True)
        distributed_c10d.init_process_group = dist.init_process_group = init_process_group

    def setup_begins(self) -> None:
        """Forget earlier calls."""
        self.calls = Calls()

    def run_begins(self, run: Run) -> None:
        """The same, unless a setup that is being stepped through continues after this run."""
        if not self._main_thread.paused_before:
            self.calls = Calls()

    def enter(self, arguments: InitArguments) -> None:
        """A call begins."""
        calls = self.calls
        calls.entered += 1
        calls.arguments = arguments
        calls.inside = True
        calls.called_ns = time.monotonic_ns()
        calls.host, calls.network = socket.gethostname(), process.network()
        self._sockets.call_begins()

    def leave(self) -> None:
        """A call returned: there is a group."""
        self.calls.returned += 1
        self.calls.inside = False

    def _await_place(self, arguments: InitArguments) -> None:
        """Wait here for the folder of a rendezvous file, or until MASTER_ADDR resolves.

        torch waits for the first with Python's lock held, so that no thread of the rank could say
        what is wrong, and for the second in C++. Raises Aborted; and once torch would give up, what
        it would raise. A call that torch will refuse anyway proceeds at once.
        """
        address, folder = arguments.master_addr, Path(arguments.path).parent
        in_file = arguments.method == "file"
        numbers = (arguments.rank, arguments.world_size, in_file or arguments.master_port)
        if None in numbers or not (in_file or address):
            return
        limit_s = arguments.timeout_s or distributed_c10d.default_pg_timeout.total_seconds()
        deadline = time.monotonic() + (_FILE_WITHIN_S if in_file else limit_s)

        def is_there() -> bool:
            if in_file:
                return folder.exists()
            return isinstance(self._resolver.lookup(address), tuple)

        try:
            while not is_there():
                self._main_thread.waiting_in = "store"
                if self._main_thread.abort.wait(_ASK_AGAIN_S):
                    raise Aborted("aborted (%ddp_abort)")
                if time.monotonic() > deadline:
                    if in_file:
                        why = os.strerror(errno.ENOENT)
                        raise dist.DistStoreError(f"open({arguments.path}): {why}")
                    why = str(self._resolver.lookup(address) or "the resolver does not answer")
                    raise dist.DistNetworkError(f"MASTER_ADDR {address!r}: {why}")
        finally:
            self._main_thread.waiting_in = ""


def original() -> Callable[..., None]:
    """torch's own `init_process_group`, not recorded."""
    call: Any = distributed_c10d.init_process_group
    torchs: Callable[..., None] = call.__wrapped__ if hasattr(call, _MARK) else call
    return torchs


def arguments_of(call: Mapping[str, Any]) -> InitArguments:
    """Return what a call of `init_process_group` will use, determined as torch does it."""
    timeout = call.get("timeout")
    made = functools.partial(
        InitArguments,
        backend=str(call.get("backend") or ""),
        timeout_s=timeout.total_seconds() if timeout is not None else None,
    )
    rank, world_size = call.get("rank", -1), call.get("world_size", -1)
    if call.get("store") is not None:
        return made("store", rank, world_size, store=_which(call["store"]))
    url = call.get("init_method") or "env://"
    parsed = urlparse(url)
    query = {key: values[-1] for key, values in parse_qs(parsed.query).items()}
    # torch appends rank and world_size to the URL when they are given.
    given_rank = rank if rank >= 0 else number(query.get("rank"))
    given_size = world_size if world_size >= 0 else number(query.get("world_size"))
    if parsed.scheme == "file":
        # A file that this rank has not written to may have its address, from an earlier run.
        data = b""
        with contextlib.suppress(OSError), files.opened(Path(parsed.path)) as stream:
            data = stream.read(1 << 20)
        address_of_rank = rb"default_pg/0//\w+//0/%d(?!\d)" % (given_rank or 0)
        stale = re.search(address_of_rank, data) is not None
        return made("file", given_rank, given_size, path=parsed.path, stale=stale)
    raw = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    if parsed.scheme == "tcp":
        address, port = parsed.hostname or "", parsed.port
    else:
        address, port = raw.get("MASTER_ADDR", ""), number(raw.get("MASTER_PORT"))
        given_rank = given_rank if given_rank is not None else number(raw.get("RANK"))
        given_size = given_size if given_size is not None else number(raw.get("WORLD_SIZE"))
    # torchrun's agent hosts the store where it says so.
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    method, hosts = parsed.scheme or "env", given_rank == 0 and not of_agent
    return made(method, given_rank, given_size, address, port, hosts_store=hosts, raw=raw)


prefixes: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Of each PrefixStore that was made in Python."""


def _which(store: Any) -> str:
    """Which store this is, in words; empty where it is not known."""
    prefix = ""
    while isinstance(store, dist.PrefixStore):
        own = prefixes.get(store, "")
        prefix = f"{own}/{prefix}" if own and prefix else own or prefix
        store = store.underlying_store
    under = f", prefix {cut(prefix, _LONGEST_PREFIX)!r}" if prefix else ""
    match store:
        case dist.TCPStore():
            return f"TCPStore at port {store.port}{under}"
        case dist.FileStore():
            return f"FileStore in {getattr(store, 'path', '?')}{under}"
        case dist.HashStore():
            return PRIVATE_STORE
    return ""


def number(text: str | None) -> int | None:
    """Return `text` as a number; None for other text."""
    with contextlib.suppress(TypeError, ValueError):
        return int(text or "")
    return None
