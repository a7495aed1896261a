"""Notes each call of `init_process_group` on this rank: with what, and whether it returned.

The call itself is torch's own, but for the wait for a MASTER_ADDR that means nothing yet: torch
could not be brought out of it. A note that fails is left out; the user's call goes on.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ddp_notebook.model import InitArguments
from ddp_notebook.rank import state
from ddp_notebook.rank.collectives import pause
from ddp_notebook.rank.inspect import host as place
from ddp_notebook.rank.inspect import reachability
from ddp_notebook.rank.setup import sockets

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MARK = "__ddp_notebook_notes__"
_ASK_AGAIN_S = 0.2


@dataclass
class Log:
    """The calls of one run: a cell, a script, a set-up."""

    entered: int = 0
    left: int = 0
    arguments: InitArguments = field(default_factory=InitArguments)
    inside: bool = False
    host: str = ""
    """The name of the host it came from, and its network (see `place`)."""
    network: str = ""


log = Log()


def begin_run() -> None:
    """A new run: what was noted before does not count."""
    global log
    log = Log()


def watch() -> None:
    """Have torch's `init_process_group` noted, under both names it is called by. Once."""
    torchs = distributed_c10d.init_process_group
    if hasattr(torchs, _MARK):
        return
    noted = _noted(torchs)
    distributed_c10d.init_process_group = noted
    dist.init_process_group = noted


def original() -> Callable[..., None]:
    """torch's own `init_process_group`, not noted."""
    call: Any = distributed_c10d.init_process_group
    torchs: Callable[..., None] = call.__wrapped__ if hasattr(call, _MARK) else call
    return torchs


def leave() -> None:
    """A call returned: there is a group."""
    log.left += 1
    log.inside = False


def _noted(torchs: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(torchs)

    @functools.wraps(torchs)
    def init_process_group(*args: Any, **options: Any) -> None:
        mine, came = log, InitArguments()
        with contextlib.suppress(Exception):  # torch itself says what is wrong with a call
            bound = signature.bind(*args, **options)
            bound.apply_defaults()
            came = arguments_of(bound.arguments)
            enter(came)
        try:
            if not dist.is_initialized():
                _await_name(came)
            torchs(*args, **options)
            if mine is log:
                leave()
        finally:
            mine.inside = False

    setattr(init_process_group, _MARK, True)
    return init_process_group


def _await_name(came: InitArguments) -> None:
    """Wait here until MASTER_ADDR means something: torch's client waits for that too, deaf to all.

    Raises GivenUp, and DistNetworkError after the call's time-out, as torch does. A call that
    torch will refuse anyway goes on at once.
    """
    complete = None not in (came.rank, came.world_size, came.master_port) and came.master_addr
    if not complete:
        return
    timeout_s = came.timeout_s or distributed_c10d.default_pg_timeout.total_seconds()
    deadline = time.monotonic() + timeout_s
    try:
        while isinstance(found := reachability.lookup(came.master_addr), str):
            state.current.waiting_in = "store"
            if state.current.give_up.wait(_ASK_AGAIN_S):
                raise pause.GivenUp("given up (%ddp_abort)")
            if time.monotonic() > deadline:
                why = found or "the resolver does not answer"
                raise dist.DistNetworkError(f"MASTER_ADDR {came.master_addr!r}: {why}")
    finally:
        state.current.waiting_in = ""


def enter(arguments: InitArguments) -> None:
    """A call begins."""
    log.entered += 1
    log.arguments = arguments
    log.inside = True
    log.host, log.network = place.host(), place.network()
    sockets.call_begins()


def arguments_of(call: Mapping[str, Any]) -> InitArguments:
    """What a call of `init_process_group` will use, as torch will find it out."""
    timeout = call.get("timeout")
    backend = str(call.get("backend") or "")
    timeout_s = timeout.total_seconds() if timeout is not None else None
    rank, world_size = call.get("rank", -1), call.get("world_size", -1)
    if call.get("store") is not None:
        return InitArguments("store", rank, world_size, backend=backend, timeout_s=timeout_s)
    url = call.get("init_method") or "env://"
    parsed = urlparse(url)
    query = {key: values[-1] for key, values in parse_qs(parsed.query).items()}
    # torch appends rank and world_size to the URL when they are given.
    given_rank = rank if rank >= 0 else number(query.get("rank"))
    given_size = world_size if world_size >= 0 else number(query.get("world_size"))
    if parsed.scheme == "file":
        return InitArguments(
            "file",
            given_rank,
            given_size,
            path=parsed.path,
            backend=backend,
            timeout_s=timeout_s,
            stale=_was_here(parsed.path, given_rank),
        )
    raw = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    if parsed.scheme == "tcp":
        address, port = parsed.hostname or "", parsed.port
    else:
        address, port = raw.get("MASTER_ADDR", ""), number(raw.get("MASTER_PORT"))
        given_rank = given_rank if given_rank is not None else number(raw.get("RANK"))
        given_size = given_size if given_size is not None else number(raw.get("WORLD_SIZE"))
    return InitArguments(
        parsed.scheme or "env",
        given_rank,
        given_size,
        address,
        port,
        backend=backend,
        timeout_s=timeout_s,
        hosts_store=given_rank == 0 and not uses_agent_store(),
        raw=raw,
    )


def _was_here(path: str, rank: int | None) -> bool:
    """True when a file that this rank has not written to yet has its address: an earlier run's."""
    try:
        data = Path(path).read_bytes()[: 1 << 20]
    except OSError:
        return False
    return re.search(rb"default_pg/0//\w+//0/%d(?!\d)" % (rank or 0), data) is not None


def uses_agent_store() -> bool:
    """True when torch takes the store for hosted by another process."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def number(text: str | None) -> int | None:
    """The number that `text` writes; None where it writes none."""
    with contextlib.suppress(TypeError, ValueError):
        return int(text or "")
    return None
