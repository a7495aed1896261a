"""The fault lab's hosts: two network namespaces with an address and a host name each, linked.

One process, `hold`, holds them open; `LabHosts` is the session's handle to it. This machine's own
network is not changed, and the kernel removes the hosts when that process has ended and no rank is
on them any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_notebook.errors import UsageMistake
from ddp_notebook.launch.called_process import CalledProcess
from ddp_notebook.launch.client import ForkServerClient
from ddp_notebook.launch.hosts_client import ProcessStarter

INTERFACE = "net0"
"""The hosts' network interface besides the loopback."""
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWNET = 0x40000000


def address(host: int) -> str:
    """The address of host 0 or 1, in a network that is reserved for documentation (RFC 5737)."""
    return f"198.51.100.{host + 1}"


def why_not() -> str:
    """Return why this machine cannot have such hosts; empty when it can. Leaves nothing behind."""
    if not sys.platform.startswith("linux"):
        return "only Linux has network namespaces"
    if shutil.which("ip") is None:
        return "the command ip is not installed (package iproute2)"
    if os.geteuid() != 0:
        return "you are not root"
    refused: list[str] = []

    def attempt() -> None:
        # In a thread of its own: the namespace belongs to that thread alone, and ends with it.
        try:
            unshare()
        except OSError as error:
            refused.append(str(error.strerror))

    thread = threading.Thread(target=attempt, name="ddp-trial-host")
    thread.start()
    thread.join()
    return f"the kernel refuses them ({refused[0]})" if refused else ""


def unshare() -> None:
    """Give the calling thread a network and a host name of its own. Raises OSError."""
    _call("unshare", _CLONE_NEWNET | _CLONE_NEWUTS)


def enter(path: str) -> None:
    """Move the calling thread into the namespace at `path`. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _call("setns", descriptor, 0)
    finally:
        os.close(descriptor)


def _call(name: str, *arguments: int) -> None:
    """Call a function of the C library that Python 3.11 lacks. Raises OSError."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def hold(report: str, names: Sequence[str], drops: str, port: int) -> None:
    """Open two hosts with these names and hold them open until this process is killed.

    Writes ``{"hosts": [{"net": path, "uts": path}, ...]}``, or ``{"error": why}``, to the file
    `report`. `drops` is what the firewall drops (see `firewall`), `port` the store's.
    """
    result: dict[str, Any]
    hosts: list[dict[str, int]] = []
    try:
        for name in names:
            unshare()
            socket.sethostname(name)
            # Without IPv6 names and addresses are unambiguous: the faults are about IPv4.
            with contextlib.suppress(OSError):
                Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
            kinds = ("net", "uts")
            # The next `unshare` leaves this host. These descriptors keep it open until this process
            # ends, and their paths are how ranks enter it.
            hosts.append({k: os.open(f"/proc/thread-self/ns/{k}", os.O_RDONLY) for k in kinds})
        paths = [{k: f"/proc/{os.getpid()}/fd/{fd}" for k, fd in host.items()} for host in hosts]
        peer = f"peer name {INTERFACE} netns {paths[0]['net']}"
        _ip(f"link add {INTERFACE} type veth {peer}", *configuration(1, drops, port))
        _call("setns", hosts[0]["net"], _CLONE_NEWNET)
        _ip(*configuration(0, drops, port))
        result = {"hosts": paths}
    except (OSError, subprocess.SubprocessError) as error:
        more = getattr(error, "stderr", None) or ""
        result = {"error": " ".join(f"{error} {more}".split())}
    unfinished = Path(report).with_suffix(".new")
    unfinished.write_text(json.dumps(result))
    unfinished.rename(report)  # atomic: a reader never sees half of it
    if "hosts" in result:
        signal.pause()


def configuration(host: int, drops: str, port: int) -> list[str]:
    """Return the commands of `ip` that configure host 0 or 1."""
    return [
        "link set lo up",
        f"addr add {address(host)}/24 dev {INTERFACE}",
        f"link set {INTERFACE} up",
        *(firewall(drops, port) if host == 0 else ()),
    ]


def firewall(drops: str, port: int) -> list[str]:
    """Return the commands that make a host drop TCP packets from the other host.

    `drops` is ``store`` for those to the store's port, ``ranks`` for all others, empty for none.
    Routing rules need no extra program, and a blackhole route drops silently, as DROP does.
    """
    incoming = f"iif {INTERFACE} ipproto tcp"
    rules = {
        "": [],
        "store": [f"rule add pref 10 {incoming} dport {port} blackhole"],
        "ranks": [
            f"rule add pref 10 {incoming} dport {port} lookup local",
            f"rule add pref 20 {incoming} blackhole",
        ],
    }[drops]
    # By default the table of local addresses is looked up first; the rules must precede it.
    return [*rules, "rule add pref 100 lookup local", "rule del pref 0"] if rules else []


def _ip(*commands: str) -> None:
    """Run commands of `ip` on this thread's host. Raises OSError, SubprocessError."""
    subprocess.run(
        ["ip", "-batch", "-"],
        input="\n".join(commands) + "\n",
        text=True,
        capture_output=True,
        check=True,
        timeout=5.0,
    )


# --------------------------------------------------------------------------- the session's end


@dataclass(frozen=True)
class Placed:
    """Where the ranks of a script run."""

    address: tuple[str, int]
    """The store's."""
    hosts: Mapping[int, Mapping[str, str]]
    """Per rank the paths of its host's namespaces ``net`` and ``uts``."""


class LabHosts:
    """Two linked hosts, which exist as long as the process that holds them open.

    `port` is the store's. All ports of a new host are free, but each use needs a different one:
    torch caches a process's stores by port, even after the host is gone. Raises UsageMistake where
    ranks are on other hosts.
    """

    def __init__(
        self,
        fork_server: ProcessStarter,
        folder: Path,
        names: tuple[str, ...],
        drops: str,
        port: int,
    ) -> None:
        if not isinstance(fork_server, ForkServerClient):
            raise UsageMistake(
                "The lab makes its hosts in this machine, and the ranks are on others. Type: "
                "%ddp_init --replace"
            )
        self.port = port
        self._report = folder / f"lab-{time.monotonic_ns()}.json"
        arguments = {"report": str(self._report), "names": names, "drops": drops, "port": port}
        self._holder = CalledProcess(
            fork_server, "ddp_notebook.launch.lab_hosts:hold", arguments, folder / "lab.log"
        )

    def place(self, world_size: int) -> Placed:
        """Wait until the hosts exist and place the ranks on them. Raises UsageMistake."""
        deadline = time.monotonic() + 10.0
        while not self._report.exists() and self._holder.alive and time.monotonic() < deadline:
            time.sleep(0.005)
        report: dict[str, Any] = {"error": "the process that makes them ended, or took too long"}
        if self._report.exists():
            report = json.loads(self._report.read_text())
        if "error" in report:
            raise UsageMistake(f"The second host could not be made: {report['error']}")
        first, second = report["hosts"]
        # Rank 1 is alone on the second host.
        hosts = {rank: second if rank == 1 else first for rank in range(world_size)}
        return Placed((address(0), self.port), hosts)

    def close(self) -> None:
        """End the process; the hosts are gone as soon as no rank is on them any more."""
        self._report.unlink(missing_ok=True)
        self._holder.kill()
