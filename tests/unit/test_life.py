"""What the board says that ranks use: of this process, which is one that can be looked at."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from saved_runs import MS, collective

from ddp_notebook.board.life import Life, bars
from ddp_notebook.board.timeline import Timeline

NOBODY = 2**22 + 7
"""A pid that no process can have."""


def sampled(
    life: Life, monkeypatch: pytest.MonkeyPatch, ranks: Mapping[int, int], times: int = 2
) -> dict[str, Any] | None:
    """The last of some samples, a second apart. Its rank makes ten steps a second."""
    timeline = Timeline(0, 2)
    steps = [replace(collective(0, n, 100 * n, 100 * n + 1), backwards=n) for n in range(1, 11)]
    timeline.take(1, steps)
    said = None
    for number in range(times):
        monkeypatch.setattr("time.monotonic", lambda at=1000.0 + 1.1 * number: at)
        monkeypatch.setattr("time.monotonic_ns", lambda: 1_100 * MS)
        said = life.sample(ranks, timeline, {0: 2**30})
    return said


def test_steps_cpu_memory_and_network_are_said_of_all_and_of_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = sampled(Life(), monkeypatch, {os.getpid(): 0, NOBODY: 1}, times=3)
    assert said is not None
    assert list(said["of"]) == [0], "one that has ended is left out"
    assert said["of"][0].startswith("rank 0: 10 steps/s ██") and " · CPU " in said["of"][0]
    assert said["of"][0].endswith("MiB · GPU 1 GiB")
    assert "machine sends " in said["all"] and said["all"].endswith("/s")


def test_it_is_sampled_once_a_second_and_only_while_somebody_watches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    life, me = Life(), {os.getpid(): 0}
    assert sampled(life, monkeypatch, me, times=1) is None, "since when is not known yet"
    looked: list[int] = []
    monkeypatch.setattr("psutil.Process.cpu_percent", lambda process: looked.append(1) or 50.0)
    assert life.sample(me, Timeline(0, 1), {}) is None and not looked
    assert sampled(Life(), monkeypatch, {}) is None and not looked
    said = sampled(life, monkeypatch, me, times=2)
    assert said is not None and looked and "50 %" in said["all"]


def test_bars_stand_for_shares_of_the_most() -> None:
    assert bars([0, 50, 100], 100) == "▁▄█"
    assert bars([0, 0]) == "▁▁" and bars([3, 6]) == "▄█"
    assert bars([150], 100) == "█"
