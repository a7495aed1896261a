"""What is sent to ranks that have just ended; how often the controller asks for signs of life."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from unittest.mock import Mock

import pytest
from tornado.ioloop import IOLoop

from ddp_notebook.cluster import controller
from ddp_notebook.cluster.cluster import IPyParallelCluster
from ddp_notebook.cluster.ipyparallel_private import CALM_S, calm
from ddp_notebook.cluster.questions import OrderSender
from ddp_notebook.errors import SessionLost, UsageMistake
from ddp_notebook.launch.devices import plan_devices
from ddp_notebook.model import Status
from ddp_notebook.rank import calls
from ddp_notebook.session import InitOptions
from ddp_notebook.session.record import Record
from ddp_notebook.session.session_processes import Processes


def test_a_rank_that_ended_before_it_was_called_could_not_answer(tmp_path: Path) -> None:
    """ipyparallel can hear of it before we do, and knows no engine of that number then."""
    cluster = IPyParallelCluster.__new__(IPyParallelCluster)
    cluster._client, cluster._views, cluster._last_reply = [], {}, {}
    cluster._pids, cluster._awake = {0: 1}, set()
    cluster._folder, cluster._orders = tmp_path, OrderSender()
    answer = cluster.call((0,), calls.GET_VALUE, lambda _: calls.VariableToSend("x", False))[0]
    assert answer.done()
    with pytest.raises(UsageMistake, match="the process of rank 0 has ended"):
        cluster.value_of(answer, 1)


def test_what_connects_to_a_session_that_has_ended_says_so(tmp_path: Path) -> None:
    """Another thread saw the fork server end: no file of the controller's will come."""
    cluster = IPyParallelCluster.__new__(IPyParallelCluster)
    cluster._folder, cluster._ended = tmp_path, Future()
    cluster._end("The fork server that started the ranks ended.")
    with pytest.raises(SessionLost, match=r"fork server .* ended\. Start again"):
        cluster._connected()


def test_what_is_asked_of_a_client_that_was_closed_meanwhile_says_why(tmp_path: Path) -> None:
    """Another thread saw the fork server end while a rank was being replaced."""

    class Closed:
        ids, _engines, _query_stream = [0], dict[int, str](), None

        def _send(self, *_: object, **__: object) -> None:
            raise RuntimeError("Event loop is closed")

        def __getitem__(self, ranks: object) -> Closed:
            return self

        push = apply_async = _send

    cluster = IPyParallelCluster.__new__(IPyParallelCluster)
    cluster._client, cluster._ended, cluster._views = Closed(), Future(), {}
    cluster._pids, cluster._awake, cluster._last_reply = {0: 1}, set(), {}
    for ask in (
        lambda: cluster._await_forgotten(0),
        lambda: cluster.push((0,), {"x": 1}, 1.0),
        lambda: cluster.call((0,), calls.GET_VALUE, lambda _: calls.VariableToSend("x", False)),
    ):
        with pytest.raises(RuntimeError, match="Event loop is closed"):
            ask()  # nobody knows why
        cluster._end("The fork server that started the ranks ended.")
        with pytest.raises(SessionLost, match=r"fork server .* ended\. Start again"):
            ask()
        cluster._ended = Future()


def test_the_controllers_heart_beats_at_each_period_only_while_an_engine_registers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, waiting, beats = 100.0, [False], list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    beat = calm(lambda _: beats.append(now_s), lambda: waiting[0])

    for period in range(12):
        now_s = 100.0 + period * CALM_S / 4
        waiting[0] = period in (6, 7)
        beat(None)

    assert beats == [100.0 + period * CALM_S / 4 for period in (0, 4, 6, 7, 11)]


def test_a_clock_that_is_set_back_does_not_stop_the_controllers_heart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """tornado's periodic callbacks wait until the wall clock has caught up."""
    monkeypatch.setattr(IOLoop, "time", IOLoop.time)  # for the tests after this one
    controller.ignore_the_wall_clock()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert abs(IOLoop.time(IOLoop.__new__(IOLoop)) - time.monotonic()) < 60


def test_a_process_that_ends_before_its_start_is_told_leaves_a_dead_rank(tmp_path: Path) -> None:
    """Under load its end can be read before the thread that starts it goes on."""

    def spawn(
        spec: object,
        on_exit: Callable[[int], None],
        begun: Callable[[int], None] = lambda pid: None,
    ) -> int:
        begun(77)
        on_exit(-9)
        return 77

    record, server = Record(), Mock()
    server.question.return_value = None
    server.spawn, server.pid, server.peak_bytes = spawn, os.getpid(), {}
    record.begin(1)
    plan = plan_devices(1, "cpu", "gloo", (), ())
    options = InitOptions(world_size=1, device="cpu")
    processes = Processes(options, plan, server, record, lambda reason: None)
    try:
        processes.cluster.wait_for = lambda *_: ()  # type: ignore[method-assign]
        processes.launch((0,))
        assert record.snapshot.ranks[0].status is Status.DEAD
    finally:
        processes.close(keep_warm=False)
