"""The one place that uses private API of ipyparallel's client, each checked before it is used.

It uses: sending messages to the hub, to unregister an engine whose process is gone
(ipyparallel itself would notice by missed heartbeats, half a minute later) and to await the answer;
the table of the engines' names; where it looks for its magics; the class that its controller starts
as the heart monitor; and the monitor's beat, with the registrations for which it must be quick.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import ipyparallel as ipp
from IPython import get_ipython

CALM_S = 1.0
"""Between two beats: each wakes every rank, also at night. Ten a second took 2 % of a core."""


def has_private_api(client: Any) -> bool:
    """Return True when this ipyparallel has what `engine_name` and `unregister` use."""
    needed = ("_query_stream", "_engines")
    return callable(getattr(client, "_send", None)) and all(hasattr(client, n) for n in needed)


def check_private_api(client: Any) -> None:
    """Warn once if ipyparallel can notice a rank's death only by missed heartbeats."""
    if not has_private_api(client):
        logging.getLogger("ddp_notebook").warning(
            "ipyparallel %s has changed: restarting a dead rank may take a minute.",
            ipp.__version__,
        )


@contextlib.contextmanager
def magics_where_they_load() -> Iterator[None]:
    """A client that is made meanwhile registers `%px` only where ipyparallel's magics can load.

    They have their help made from docstrings, which ``python -OO`` removes. The first client looks
    for `%px` among the magics, and registers all if it is not there.
    """
    shell = get_ipython()
    lines = shell.magics_manager.magics["line"] if shell is not None else {}
    if sys.flags.optimize < 2 or "px" in lines:
        yield
        return
    lines["px"] = ""
    try:
        yield
    finally:
        del lines["px"]


def engine_name(client: Any, rank: int) -> str | None:
    """ipyparallel's name for the engine of `rank`, None when the client knows none."""
    name: str | None = getattr(client, "_engines", {}).get(rank)
    return name


def unregister(client: Any, rank: int) -> None:
    """Tell the hub to unregister the engine of `rank`, so that its id is free at once.

    Also for one that the client does not know: it may have died half registered; the hub would keep
    its id for half a minute and give the next engine another id.
    """
    if has_private_api(client):
        client._send(client._query_stream, "unregistration_request", content={"id": rank})


def caught_up(client: Any) -> Future[Any]:
    """Done as soon as the hub has processed all earlier messages."""
    if not has_private_api(client):
        done: Future[Any] = Future()
        done.set_result(None)
        return done
    answer: Future[Any] = client._send(client._query_stream, "connection_request")
    return answer


class _Heart(threading.Thread):
    """The controller's heart monitor as a thread: as a process it takes 20 MB."""

    def terminate(self) -> None:
        """It ends with the controller."""


def keep_heart_in_process() -> None:
    """Make controllers created from now on start their heart monitor as a thread.

    It has its own loop and sockets anyway. It beats at each period only while an engine registers.
    Without this private API it is a child process, and beats at each period.
    """
    from ipyparallel.controller import app, heartmonitor

    def registering() -> bool:
        hub = getattr(app.IPController.instance(), "hub", None)
        return bool(getattr(hub, "incoming_registrations", True))

    if hasattr(app, "Process"):
        app.Process = _Heart
        if hasattr(heartmonitor.HeartMonitor, "beat"):
            heartmonitor.HeartMonitor.beat = calm(heartmonitor.HeartMonitor.beat, registering)


def calm(beat: Callable[[Any], None], hurried: Callable[[], bool]) -> Callable[[Any], None]:
    """`beat`, but unless it is hurried once in `CALM_S`, however often it is called."""
    next_s = 0.0

    def calmed(monitor: Any) -> None:
        nonlocal next_s
        if time.monotonic() >= next_s or hurried():
            next_s = time.monotonic() + CALM_S
            beat(monitor)

    return calmed
