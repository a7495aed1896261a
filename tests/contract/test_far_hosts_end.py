"""How a session whose ranks are on far hosts ends: nothing is left on any of them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from far_agents import two_hosts
from far_hosts import FarHosts
from kernels import Kernel
from results import last_values
from support import eventually

from ddp_notebook.launch.placement import parse_hosts
from ddp_notebook.model import Status
from ddp_notebook.session import InitOptions, Session
from ddp_notebook.testing import processes_of

OPTIONS = InitOptions(
    world_size=4, device="cpu", hosts=parse_hosts("far-a:2,far-b"), python=sys.executable
)


@pytest.fixture(scope="module")
def hosts(
    nothing_left_behind_by_the_module: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FarHosts]:
    with two_hosts(tmp_path_factory.mktemp("far")) as made:
        yield made


def test_a_shutdown_leaves_nothing_and_the_next_start_works(hosts: FarHosts) -> None:
    session = Session()
    try:
        for _ in range(2):
            session.init(OPTIONS)
            session.shutdown(keep_warm=True)
            hosts.nothing_left()
    finally:
        session.shutdown()


def test_a_lost_host_ends_its_ranks_alone(hosts: FarHosts) -> None:
    session = Session()
    try:
        session.init(OPTIONS)
        client: Any = processes_of(session).fork_server
        os.kill(client._far[2].ssh.pid, signal.SIGKILL)
        dead = (2, 3)
        eventually(lambda: session.record.snapshot.with_status(Status.DEAD) == dead, 15)
        assert "Host far-b was lost" in session.record.snapshot.ranks[2].last_words
        assert last_values(session, "rank", ranks=(0, 1)) == {(0,): "0", (1,): "1"}
        hosts.nothing_left_on("far-b")
    finally:
        session.shutdown()
    hosts.nothing_left()


def test_a_kernel_that_is_killed_leaves_nothing_anywhere(hosts: FarHosts) -> None:
    with Kernel() as kernel:
        kernel.run_well("%load_ext ddp_notebook")
        kernel.run_well(
            f"%ddp_init --hosts far-a:2,far-b:2 --world-size 4 --python {sys.executable}", 120
        )
        shown = kernel.run_well("%%ddp\nimport socket\nprint(rank, socket.gethostname())").text
        assert "far-b" in shown
        assert hosts.left("far-a")
        kernel.kill()
        hosts.nothing_left()
