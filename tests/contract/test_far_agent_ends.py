"""How agents end, whatever is killed or cut; and what is said where there can be none."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from far_agents import NAMES, Reached, reached, two_hosts
from far_hosts import FarHosts
from support import eventually

import ddp_notebook
from ddp_notebook.errors import SetupFailed
from ddp_notebook.launch.ssh_hosts import SSH_VARIABLE


@pytest.fixture(scope="module")
def shared_hosts(
    nothing_left_behind_by_the_module: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FarHosts]:
    with two_hosts(tmp_path_factory.mktemp("far")) as made:
        yield made


@pytest.fixture
def hosts(shared_hosts: FarHosts) -> Iterator[FarHosts]:
    yield shared_hosts
    shared_hosts.nothing_left()


# -- what happens to them ----------------------------------------------------------------------


def ends(made: Reached, host: int, ended: Future[int], why: str) -> None:
    """A host was lost: that is told, and the others go on."""
    assert ended.result(20) == -signal.SIGKILL
    assert re.search(f"Host {NAMES[host - 1]} was lost: .*{why}", made.log(host))
    with pytest.raises(OSError, match=NAMES[host - 1]):
        made.start("pass", host=host)
    assert made.client.question(host, "stopped", pids=[]) is None
    assert made.client.alive
    made.hosts.nothing_left_on(NAMES[host - 1])
    other = 3 - host
    _, ended = made.start("print('still here', flush=True)", host=other)
    assert ended.result(30) == 0


STAYS = (
    "import signal, subprocess\n"
    "subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    "print('up', flush=True); signal.pause()"
)


def test_an_agent_that_is_killed_leaves_nothing(hosts: FarHosts) -> None:
    with reached(hosts) as made:
        _, ended = made.start(STAYS)
        eventually(lambda: "up" in made.log(), 10)
        os.kill(made.pid_here(1, "import base64"), signal.SIGKILL)
        ends(made, 1, ended, "its ssh ended")


def test_a_fork_server_there_that_is_killed_leaves_nothing(hosts: FarHosts) -> None:
    with reached(hosts) as made:
        _, ended = made.start(STAYS, host=2)
        eventually(lambda: "up" in made.log(2), 10)
        os.kill(made.pid_here(2, "fork_server"), signal.SIGKILL)
        ends(made, 2, ended, "fork server")


def test_an_ssh_that_is_killed_leaves_nothing(hosts: FarHosts) -> None:
    with reached(hosts) as made:
        _, ended = made.start(STAYS)
        eventually(lambda: "up" in made.log(), 10)
        os.kill(made.client._far[1].ssh.pid, signal.SIGKILL)
        ends(made, 1, ended, "its ssh ended")


def test_a_link_that_is_cut_loses_nothing(hosts: FarHosts) -> None:
    counts = "import time\nfor n in range(60): print(n, flush=True); time.sleep(0.1)"
    with reached(hosts) as made:
        _, ended = made.start(counts, host=2)
        eventually(lambda: "\n3\n" in made.log(2), 10)
        with hosts.cut("far-b"):
            eventually(lambda: made.client.silent_s(2) > 2.0, 10)
            assert made.client.silent_s(1) < 1.0
            began_s = time.monotonic()
            assert made.client.question(2, "stopped", pids=[]) is None
            assert time.monotonic() - began_s < 0.5
            known = made.log(2)
            threading.Event().wait(1.0)
            assert made.log(2) == known
        eventually(lambda: made.client.silent_s(2) < 0.5, 10)
        assert ended.result(20) == 0
        assert made.log(2).split() == [str(n) for n in range(60)]


def test_a_host_that_is_cut_off_for_too_long_ends_itself(hosts: FarHosts) -> None:
    with reached(hosts, give_up_after_s=3.0) as made:
        _, ended = made.start(STAYS, host=2)
        eventually(lambda: "up" in made.log(2), 10)
        with hosts.cut("far-b"):
            assert ended.result(20) == -signal.SIGKILL
            assert "was last seen" in made.log(2)
            # sshd itself waits for the client of its connection: it is none of ours.
            eventually(lambda: not _ours(hosts, "far-b"), 15, "the agent and its processes")
            assert not list(hosts.tmp("far-b").glob("ddp_notebook-*"))


def _ours(hosts: FarHosts, name: str) -> list[str]:
    return [each for each in hosts.processes(name).values() if not each.startswith("sshd")]


# -- when there is no agent ------------------------------------------------------------------


def refused(hosts: FarHosts, names: tuple[str, ...] = NAMES, **options: Any) -> str:
    made = Reached(hosts, names, **options)
    try:
        with pytest.raises(SetupFailed) as failed:
            made.reach()
        hosts.nothing_left()  # before it is closed: agents of other hosts have ended, too
        return str(failed.value)
    finally:
        made.close()


def test_a_host_that_no_one_knows(hosts: FarHosts) -> None:
    said = refused(hosts, ("far-a", "no-such-host"))
    assert said.startswith("Host no-such-host cannot be reached")
    assert "Could not resolve hostname" in said
    assert said.endswith("Try it in a shell: " + hosts.ssh + " no-such-host true")


def test_a_host_that_does_not_answer(hosts: FarHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SSH_VARIABLE, f"{hosts.ssh} -o ConnectTimeout=1")
    with hosts.cut("far-b"):
        said = refused(hosts)
    assert said.startswith("Host far-b cannot be reached")
    assert "timed out" in said


def test_a_key_that_is_refused(hosts: FarHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    config = hosts.folder / "no-key"
    config.write_text(hosts.config.read_text().replace(f"{hosts.folder}/user", "/dev/null"))
    monkeypatch.setenv(SSH_VARIABLE, f"ssh -F {config}")
    said = refused(hosts)
    assert "Permission denied" in said
    assert "no password is asked for" in said


def test_no_python_there(hosts: FarHosts) -> None:
    said = refused(hosts, python="/no/such/python")
    assert said.startswith("There is no Python /no/such/python on host far-")
    assert "--python" in said


def test_a_python_without_the_package_there(hosts: FarHosts) -> None:
    empty = hosts.tmp("far-b") / "python"
    empty.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {sys.executable} -S "$@"\n')
    empty.chmod(0o755)
    said = refused(hosts, ("far-b",), python="/tmp/python")
    assert "ddp_notebook is missing" in said
    assert f"-m pip install ddp-notebook=={ddp_notebook.__version__}" in said


def test_another_python_there(hosts: FarHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version", "3.9.1 (main)")
    said = refused(hosts, ("far-b",))
    assert "and the notebook 3.9.1" in said
    assert said.endswith("--python /path/to/python3.9")


def test_another_release_of_the_package_there(
    hosts: FarHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ddp_notebook, "__version__", "9.9.9")
    said = refused(hosts, ("far-b",))
    assert "and the notebook 9.9.9" in said
    assert "pip install ddp-notebook==9.9.9" in said


def test_an_sshd_that_forwards_nothing(hosts: FarHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SSH_VARIABLE, f"{hosts.ssh} -p 23")
    config = hosts.folder / "sshd-no"
    config.write_text((hosts.folder / "sshd").read_text() + "AllowTcpForwarding no\nPort 23\n")
    hosts.run("far-b", "/usr/sbin/sshd", "-f", str(config))
    try:
        said = refused(hosts, ("far-b",))
    finally:
        hosts.run("far-b", "sh", "-c", "kill $(pgrep -f sshd-no)")
    assert "AllowTcpForwarding yes in sshd_config" in said


def test_no_room_for_a_folder_there(hosts: FarHosts) -> None:
    limited = hosts.tmp("far-b") / "limited"
    limited.write_text(f'#!/bin/sh\nulimit -f 0\nexec {sys.executable} "$@"\n')
    limited.chmod(0o755)
    said = refused(hosts, ("far-b",), python="/tmp/limited")
    assert said.startswith("Host far-b: its agent cannot start: [Errno 2] No usable temporary")


def test_a_folder_that_is_named_and_not_there(hosts: FarHosts) -> None:
    said = refused(hosts, ("far-b",), folder="/no/such")
    assert said == (
        "Host far-b: its agent cannot start: there is no folder /no/such, which --folder names"
    )
