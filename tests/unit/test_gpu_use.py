"""What the board says of the memory of GPUs. The driver is a stand-in."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence

import pytest
from nvml import FakeNvml, install

from ddp_notebook.launch.gpu_use import GpuUse

GIB = 2**30
NOBODY = 2**22 + 7
"""A pid that no process can have."""


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    gpus = [("GPU-a", "H200", (12 * GIB, 139 * GIB)), ("GPU-b", "H200", (0, 139 * GIB))]
    return install(monkeypatch, FakeNvml(gpus))


def said(use: GpuUse, gpus: Sequence[str], ranks: Mapping[int, int]) -> tuple[str, ...]:
    """What is known once the driver has answered."""
    use.lines(gpus, ranks)
    if use._asking is not None:
        use._asking.join()
    return use.lines(gpus, ranks)


def test_who_holds_the_memory_of_a_gpu_is_named(driver: FakeNvml) -> None:
    driver.users[0] = [(os.getpid(), 1 * GIB), (11, 3 * GIB), (10, 8 * GIB), (NOBODY, None)]
    first, second = said(GpuUse(), ("0", "0", "GPU-b"), {10: 0, 11: 1})
    assert first.startswith("GPU 0: 12 GiB of 139 GiB used: rank 0 8 GiB, rank 1 3 GiB, ")
    assert f"(pid {os.getpid()}) 1 GiB" in first and first.endswith(f"pid {NOBODY}")
    assert second == "GPU GPU-b: 0 B of 139 GiB used"


def test_the_driver_is_asked_now_and_then(
    driver: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    use, now_s = GpuUse(), 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    before = said(use, ("0",), {})
    driver.users[0] = [(10, GIB)]
    assert said(use, ("0",), {10: 0}) == before and use.lines((), {}) == ()
    now_s += 2.5
    assert said(use, ("0",), {10: 0}) != before
    assert driver.open == 1


def test_of_what_the_driver_does_not_report_nothing_is_said(driver: FakeNvml) -> None:
    assert said(GpuUse(), ("MIG-7",), {}) == ()


def test_a_driver_that_does_not_answer_holds_nobody_up(
    driver: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    use, now_s, answers = GpuUse(), 100.0, threading.Event()
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    opens = driver.nvmlInit
    monkeypatch.setattr(driver, "nvmlInit", lambda: (answers.wait(30), opens()))
    assert use.lines(("0",), {}) == ()
    asking, now_s = use._asking, 200.0
    assert use.lines(("0",), {}) == () and use._asking is asking, "asked once at a time"
    answers.set()
    assert asking is not None
    asking.join()
    assert use.lines(("0",), {})[0].startswith("GPU 0: 12 GiB of 139 GiB used")
    assert said(use, ("0",), {}) and driver.open == 1
