"""Waiting longer on a machine that has more to do than it can."""

from __future__ import annotations

import os

import pytest

from ddp_notebook.launch.timeouts import stretched


@pytest.mark.parametrize(
    ("load", "cores", "expected_s"),
    [(0.0, 2, 10.0), (2.0, 2, 10.0), (6.0, 2, 30.0), (500.0, 2, 80.0), (4.0, None, 40.0)],
)
def test_time_is_stretched_by_the_tasks_per_core(
    monkeypatch: pytest.MonkeyPatch, load: float, cores: int | None, expected_s: float
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert stretched(10.0) == expected_s


def test_where_there_is_no_load_average_time_is_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "getloadavg", raising=False)
    assert stretched(10.0) == 10.0
