"""The fault lab's hosts: real network namespaces, and nothing of them is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels import Kernel
from support import eventually, is_alive, need_lab_hosts, our_processes

from ddp_notebook.errors import UsageMistake
from ddp_notebook.launch import lab_hosts
from ddp_notebook.launch.lab_hosts import INTERFACE, address
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.rank import calls
from ddp_notebook.rank.setup import reachability
from ddp_notebook.session import InitOptions, Session
from ddp_notebook.session.tools import fault_lab
from ddp_notebook.testing import cluster_of

PORT = 29500
KILLED_WITHIN_S = 5.0


@pytest.fixture(autouse=True)
def _needed() -> None:
    need_lab_hosts()


def own_network() -> set[Path]:
    """The network that this test run is in, once nothing of it is in another one.

    A thread that has been joined may be in its own for a moment more: so is the one that tried, for
    `need_lab_hosts`, just before a test begins. The number of a network that is gone is used again.
    """
    own = {Path("/proc/self/ns/net").readlink()}
    eventually(lambda: networks() <= own, 5, "the end of other networks")
    return own


def networks() -> set[Path]:
    """The networks that threads of this test run are in, and those that they hold open."""
    found = set()
    for pid in (os.getpid(), *(process.pid for process in our_processes())):
        process = Path("/proc", str(pid))
        with contextlib.suppress(OSError):
            for link in (*process.glob("task/*/ns/net"), *process.glob("fd/*")):
                with contextlib.suppress(OSError):
                    found.add(link.readlink())
    return {each for each in found if str(each).startswith("net:")}


@contextlib.contextmanager
def two_hosts(folder: Path, drops: str = "") -> Iterator[list[dict[str, str]]]:
    """The namespaces of two hosts, held by a process as a session has it."""
    path = folder / "lab.json"
    code = f"from ddp_notebook.launch.lab_hosts import hold; hold({str(path)!r}, "
    code += f"['lab-0', 'lab-1'], {drops!r}, {PORT})"
    holder = subprocess.Popen([sys.executable, "-c", code])
    try:
        eventually(path.exists, 10, "the hosts")
        report = json.loads(path.read_text())
        assert "error" not in report, report
        yield report["hosts"]
    finally:
        holder.kill()
        holder.wait()


@contextlib.contextmanager
def on(host: dict[str, str]) -> Iterator[None]:
    """Within, this thread is on a host."""
    home = [f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/{kind}" for kind in host]
    descriptors = [os.open(path, os.O_RDONLY) for path in home]
    try:
        for path in host.values():
            lab_hosts.enter(path)
        yield
    finally:
        for descriptor in descriptors:
            lab_hosts.enter(f"/proc/self/fd/{descriptor}")
            os.close(descriptor)


@contextlib.contextmanager
def listener(host: dict[str, str], at: str, port: int = 0) -> Iterator[str]:
    """Somebody who listens on a host, as ``address:port``."""
    with on(host):
        server = socket.create_server((at, port))
    with server:
        yield ":".join(map(str, server.getsockname()[:2]))


def states(host: dict[str, str], *targets: str) -> list[str]:
    """How attempts to connect from a host end."""
    with on(host):
        return [probe.state for probe in reachability.reach(targets)]


def found_by(host: dict[str, str], target: str) -> None:
    """Returns when it is: hosts find each other anew, and on a busy machine not within a probe."""
    eventually(lambda: states(host, target) == ["open"], 30)


# --------------------------------------------------------------------------- what they are


def test_two_hosts_reach_each_other_and_have_ports_of_their_own(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as (first, second), listener(first, address(0), PORT) as open_at:
        with on(second):
            assert socket.gethostname() == "lab-1"
            assert {name for _, name in socket.if_nameindex()} == {"lo", INTERFACE}
        nobody = f"{address(0)}:{PORT + 1}"
        assert states(second, open_at, nobody) == ["open", "refused"]
        assert states(second, f"127.0.0.1:{PORT}") == ["refused"]


def test_a_firewall_drops_without_a_word_and_lets_the_own_host_in(tmp_path: Path) -> None:
    with (
        two_hosts(tmp_path, "store") as (first, second),
        listener(first, address(0), PORT) as store,
        listener(first, address(0)) as rank,
    ):
        found_by(second, rank)
        began = time.monotonic()
        assert states(second, store, rank) == ["timeout", "open"]
        assert time.monotonic() - began < scaled_for_load(1)
        assert states(first, store) == ["open"]


def test_a_firewall_that_leaves_the_store_open_drops_both_ways(tmp_path: Path) -> None:
    with (
        two_hosts(tmp_path, "ranks") as (first, second),
        listener(first, address(0), PORT) as store,
        listener(first, address(0)) as here,
        listener(second, address(1)) as there,
    ):
        found_by(second, store)
        assert states(second, store, here, there) == ["open", "timeout", "open"]
        assert states(first, store, here, there) == ["open", "open", "timeout"]


# --------------------------------------------------------------------------- being there


def test_knocking_at_ranks_that_connect_does_not_disturb_them(session: Session) -> None:
    session.init(InitOptions(world_size=3, device="cpu", step=True))
    session.step(to="rendezvous")
    session.step((0, 2))
    cluster = cluster_of(session)
    found = cluster.ask((0, 2), calls.REPORT, calls.Nothing(), 5.0)
    targets = [each for rank in (0, 2) for each in found[rank].network.listens]
    assert len(targets) == 2
    for _ in range(5):
        knocked = cluster.ask((0, 1, 2), calls.REACH, calls.Targets(tuple(targets)), 5.0)
        assert [len(knocked[rank].probes) for rank in range(3)] == [1, 2, 1]
        assert {p.state for each in knocked.values() for p in each.probes} == {"open"}
    session.step((1,))
    session.step(to="verified")
    assert session.ready


# --------------------------------------------------------------------------- the end


def test_who_is_not_root_is_told_what_it_takes_before_anything_is_changed() -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:  # another user for good, so not in this process
        try:
            os.setuid(65534)
            fault_lab.check_hosts()
        except UsageMistake as mistake:
            os.write(write, str(mistake).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read) as told:
        text = told.read()
    assert "you are not root" in text
    assert "Start Jupyter as root on Linux" in text


def test_the_trial_leaves_nothing_behind() -> None:
    before = own_network()
    assert lab_hosts.why_not() == ""
    eventually(lambda: networks() <= before, 5, "the end of the trial's thread")


def test_hosts_are_gone_when_the_fault_is_repaired_and_when_the_ranks_are_freed(
    session: Session,
) -> None:
    before = own_network()
    session.init(InitOptions(world_size=2, device="cpu"))
    session.fault("firewall-store")
    assert len(networks() - before) == 2
    session.repair()
    eventually(lambda: networks() <= before, 5, "no host after a repair")
    session.fault("firewall-ranks")
    assert len(networks() - before) == 2
    session.abort()
    eventually(lambda: networks() <= before, 5, "no host when the ranks are free")
    session.fault("loopback-name")
    session.shutdown()
    eventually(lambda: networks() <= before, 5, "no host after the session")


@pytest.mark.parametrize("victim", ["kernel", "fork server"])
def test_hosts_do_not_outlive_a_session_that_is_killed(victim: str) -> None:
    before = own_network()
    with Kernel() as kernel:
        kernel.init(2)
        pids = kernel.pids()
        kernel.run("%ddp_fault firewall-ranks")
        assert len(networks() - before) == 2
        holder = kernel.ask(
            "get_ipython()._ddp_notebook_magics.session.pool.processes._lab._holder.pid"
        )
        assert is_alive(holder)
        os.kill(kernel.pid if victim == "kernel" else pids.fork_server, signal.SIGKILL)
        eventually(lambda: not is_alive(holder), KILLED_WITHIN_S, "the end of who held them")
        eventually(lambda: networks() <= before, KILLED_WITHIN_S, "the end of the hosts")
        eventually(lambda: not Path(pids.folder).exists(), what="the end of the session")
