"""What is sent to ranks that have just ended."""

from __future__ import annotations

import time

import pytest
from tornado.ioloop import IOLoop

from ddp_notebook.cluster import engine
from ddp_notebook.cluster.cluster import IPyParallelCluster
from ddp_notebook.errors import UsageMistake
from ddp_notebook.rank import calls


def test_a_rank_that_ended_before_it_was_called_could_not_answer() -> None:
    """ipyparallel can hear of it before we do, and knows no engine of that number then."""
    cluster = IPyParallelCluster.__new__(IPyParallelCluster)
    cluster._client, cluster._views, cluster._last_reply = [], {}, {}
    cluster._pids, cluster._awake = {0: 1}, set()
    answer = cluster.call((0,), calls.GET_VALUE, lambda _: calls.Variable("x", False))[0]
    assert answer.done()
    with pytest.raises(UsageMistake, match="the process of rank 0 has ended"):
        cluster.value_of(answer, 1)


def test_a_clock_that_is_set_back_does_not_stop_the_controllers_heart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """tornado's periodic callbacks wait until the wall clock has caught up."""
    monkeypatch.setattr(IOLoop, "time", IOLoop.time)  # for the tests after this one
    engine.ignore_the_wall_clock()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert abs(IOLoop.time(IOLoop.__new__(IOLoop)) - time.monotonic()) < 60
