"""What a machine is said to have and to do, from files as Linux writes them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from nvml import FakeNvml, install

from ddp_notebook.rank.bench import gloo_thread
from ddp_notebook.rank.bench.host_load import Meter, RunQueue, busy_s
from ddp_notebook.rank.bench.links import links, pcie_gb_per_s

STAT = """cpu  1000 0 0 9000 0 0 0 0 0 0
cpu0 100 20 30 400 50 6 7 8 0 0
cpu1 900 0 0 100 0 0 0 0 0 0
intr 12345
"""


def write(path: Path, text: str) -> None:
    """A file, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("speed", "width", "gb_per_s"),
    [("32.0 GT/s PCIe", "16", 63.0), ("16.0 GT/s PCIe", "8", 15.75), ("5.0 GT/s PCIe", "4", 2.0)],
)
def test_a_pcie_link_carries_its_rate_less_what_the_encoding_takes(
    tmp_path: Path, speed: str, width: str, gb_per_s: float
) -> None:
    write(tmp_path / "current_link_speed", speed + "\n")
    write(tmp_path / "current_link_width", width + "\n")
    assert pcie_gb_per_s(tmp_path) == pytest.approx(gb_per_s, rel=0.01)


def test_a_link_that_does_not_tell_is_not_made_up(tmp_path: Path) -> None:
    assert pcie_gb_per_s(tmp_path) == 0
    write(tmp_path / "current_link_speed", "Unknown")
    write(tmp_path / "current_link_width", "0")
    assert pcie_gb_per_s(tmp_path) == 0
    assert links("cpu", "", tmp_path) == []


def test_nvlink_is_listed_for_gpus_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the driver: there is no GPU where this runs."""
    install(monkeypatch, FakeNvml([("GPU-aa", "NVIDIA A", None)], links=(1, 1)))
    (nvlink,) = links("cuda", "0000:1B:00.0", tmp_path)
    assert (nvlink["what"], nvlink["bandwidth_gb_per_s"]) == ("NVLink", pytest.approx(53.124))
    assert links("cpu", "0000:1B:00.0", tmp_path) == []


def test_network_cards_that_are_up_are_named_with_their_source(tmp_path: Path) -> None:
    write(tmp_path / "class/infiniband/mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)\n")
    for name, state, speed in (
        ("eth0", "up", "25000"),
        ("eth1", "down", "-1"),
        ("eth2", "up", "-1"),
    ):
        write(tmp_path / f"class/net/{name}/operstate", f"{state}\n")
        write(tmp_path / f"class/net/{name}/speed", f"{speed}\n")
        (tmp_path / f"class/net/{name}/device").mkdir()
    write(tmp_path / "class/net/lo/operstate", "unknown\n")
    found = {link["what"]: link for link in links("cpu", "", tmp_path)}
    assert {what: link["bandwidth_gb_per_s"] for what, link in found.items()} == {
        "network card mlx5_0": 50.0,
        "network card eth0": 3.125,
    }
    assert found["network card eth0"]["source"].endswith("class/net/eth0/speed")


def test_busy_time_is_of_the_cores_that_may_be_used(tmp_path: Path) -> None:
    write(tmp_path / "stat", STAT)
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    assert busy_s(tmp_path / "stat", frozenset({0})) == pytest.approx(171 * tick_s)
    assert busy_s(tmp_path / "stat", frozenset({0, 1})) == pytest.approx(1071 * tick_s)
    assert busy_s(tmp_path / "stat", frozenset({7})) is None
    assert busy_s(tmp_path / "none") is None


def test_what_this_process_does_is_its_own() -> None:
    began = Meter.read()
    end_s = time.process_time() + 0.05
    while time.process_time() < end_s:
        pass
    spent = began.until(Meter.read())
    assert spent["cpu_s"] >= 0.05
    assert spent["seconds"] > 0


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux alone has this policy")
def test_what_a_thread_waited_for_a_core_is_read_and_nothing_where_it_is_not_told(
    tmp_path: Path,
) -> None:
    told = tmp_path / "schedstat"
    told.write_text("725923 42504 17\n")
    queue = RunQueue(told)
    assert queue.waited_ns() == 42504
    told.write_text("925923 62504 19\n")
    assert queue.waited_ns() == 62504
    queue.close()
    assert queue.waited_ns() == 0
    queue.close()
    assert RunQueue(tmp_path / "none").waited_ns() == 0


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="Linux tells this")
def test_a_thread_that_shares_a_core_waits_for_it() -> None:
    before = os.sched_getaffinity(0)
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        core = {min(before)}
        os.sched_setaffinity(child.pid, core)
        os.sched_setaffinity(0, core)  # of this thread alone
        queue = RunQueue()
        first = queue.waited_ns()
        deadline = time.monotonic() + 30
        while queue.waited_ns() == first and time.monotonic() < deadline:
            sum(range(10_000))
        assert queue.waited_ns() > first
        queue.close()
    finally:
        os.sched_setaffinity(0, before)
        child.kill()
        child.wait()


def test_a_loop_thread_is_known_by_its_name_and_gets_its_policy_back() -> None:
    done = threading.Event()
    named = threading.Event()

    def loop() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("gloo_tcp_loop")
        named.set()
        done.wait(10)

    assert gloo_thread.threads() == []
    assert gloo_thread.cpu_s() is None
    thread = threading.Thread(target=loop)
    thread.start()
    try:
        assert named.wait(10)
        (found,) = gloo_thread.threads()
        assert found == thread.native_id
        usual = gloo_thread.policies()
        gloo_thread.batch()
        assert gloo_thread.policies() == {found: os.SCHED_BATCH}
        gloo_thread.restore(usual)
        assert gloo_thread.policies() == usual
        assert gloo_thread.cpu_s() is not None
    finally:
        done.set()
        thread.join()
