"""The processes of a session: what is loaded for them, when the user interrupts meanwhile."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any, cast
from unittest.mock import Mock

import pytest

from ddp_notebook.launch.devices import DevicePlan
from ddp_notebook.session import pool
from ddp_notebook.session.options import InitOptions
from ddp_notebook.session.record import Record


@pytest.fixture(autouse=True)
def raised_as_usual() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, whatever the test runner does with it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def test_an_interrupt_while_the_session_loads_hits_no_import_and_the_next_start_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In an import it left Python's lock of the module taken: every later start waited for ever."""
    go_on, threads = threading.Event(), []

    def load() -> Any:
        threads.append(threading.current_thread())
        if len(threads) == 1:
            interrupt()
        assert go_on.wait(20)
        return lambda *parts: parts

    def start() -> Any:
        return ranks.open(InitOptions(world_size=1), DevicePlan("gloo", ("cpu",)), "spawn")

    ranks, fork_server = pool.RankPool(Record()), Mock()
    monkeypatch.setattr(ranks, "warm_fork_server", lambda _: fork_server)
    monkeypatch.setattr(pool, "_processes_class", load)
    with pytest.raises(KeyboardInterrupt):
        start()
    assert fork_server.close.called
    assert ranks.processes is None
    go_on.set()
    assert start()[2] is fork_server
    assert threading.main_thread() not in threads
    for thread in threads:
        thread.join(20)


def test_an_interrupt_while_ranks_are_shut_down_does_not_leave_them_half_ended() -> None:
    """The board said that they were ready, and their processes had no owner any more."""
    ended = []

    class Processes:
        def close(self, keep_warm: bool) -> bool:
            interrupt()
            ended.append(keep_warm)
            return False

    record = Record()
    record.begin(2)
    ranks = pool.RankPool(record)
    ranks.processes = cast(Any, Processes())
    ranks.shut_down(keep_warm=True)
    assert ended == [True] and ranks.processes is None
    assert record.snapshot.world_size == 0


def test_a_loss_that_is_known_late_is_not_the_loss_of_the_next_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end of a fork server was told a second after it: the next %ddp_init ended with it."""
    closed = threading.Event()

    class Processes:
        def __init__(self, *given: Any) -> None:
            self.fork_server, self.lose = given[2], given[4]

        def close(self, keep_warm: bool) -> bool:
            closed.set()
            return False

    ranks = pool.RankPool(Record())
    monkeypatch.setattr(pool, "_processes_class", lambda: Processes)
    monkeypatch.setattr(ranks, "warm_fork_server", lambda mode: None)
    nothing = cast(Any, None)
    first = cast(Any, ranks.open(InitOptions(), nothing, "fork"))
    ranks.close("New ranks were started.")
    second = cast(Any, ranks.open(InitOptions(), nothing, "fork"))
    closed.clear()
    first.lose("It ended.")
    assert not ranks.lost_reason and ranks.processes is second
    second.lose("It ended as well.")
    assert ranks.lost_reason == "It ended as well." and closed.wait(20)
