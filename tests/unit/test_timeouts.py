"""Timeouts grow with the load of the machine."""

from __future__ import annotations

import os

import pytest

from ddp_notebook.launch.timeouts import scaled_for_load


@pytest.mark.parametrize(
    ("load", "cores", "expected_s"),
    [(0.0, 2, 10.0), (2.0, 2, 10.0), (6.0, 2, 30.0), (500.0, 2, 80.0), (4.0, None, 40.0)],
)
def test_a_timeout_is_scaled_by_the_tasks_per_core(
    monkeypatch: pytest.MonkeyPatch, load: float, cores: int | None, expected_s: float
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert scaled_for_load(10.0) == expected_s
