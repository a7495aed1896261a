"""Hosts of the fault lab: network namespaces with an address and a host name each, on one link.

One process holds them. Nothing of this machine's own network is changed, and all of it vanishes
when that process has ended and no rank is on a host any more.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

INTERFACE = "net0"
"""The hosts' network interface, beside the loopback."""
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWNET = 0x40000000
_COMMAND_S = 5.0


def address(place: int) -> str:
    """The address of the host in this place. The network is one for documents (RFC 5737)."""
    return f"198.51.100.{place + 1}"


def why_not() -> str:
    """Why there can be no such hosts here; empty when there can. Nothing is left of the trial."""
    if not sys.platform.startswith("linux"):
        return "only Linux has network namespaces"
    if shutil.which("ip") is None:
        return "the command ip is not installed (package iproute2)"
    if os.geteuid() != 0:
        return "you are not root"
    refused: list[str] = []

    def try_it() -> None:
        # A namespace is its thread's, and ends with it.
        try:
            unshare()
        except OSError as error:
            refused.append(str(error.strerror))

    trial = threading.Thread(target=try_it, name="ddp-trial-host")
    trial.start()
    trial.join()
    return f"the kernel refuses them ({refused[0]})" if refused else ""


def unshare() -> None:
    """Give the calling thread a network and a host name of its own. Raises OSError."""
    _call("unshare", _CLONE_NEWNET | _CLONE_NEWUTS)


def _call(name: str, *arguments: int) -> None:
    """A function of the C library that Python 3.11 does not have. Raises OSError."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def hold(said: str, names: Sequence[str], drops: str, port: int) -> None:
    """Open two hosts with these names and hold them until this process is ended.

    Writes ``{"hosts": [{"net": path, "uts": path}, ...]}``, or ``{"error": why}``, to the file
    `said`. `drops` is what does not pass between them (see `firewall`), `port` the store's.
    """
    told: dict[str, Any]
    try:
        told = {"hosts": _open(names, drops, port)}
    except (OSError, subprocess.SubprocessError) as error:
        more = getattr(error, "stderr", None) or ""
        told = {"error": " ".join(f"{error} {more}".split())}
    ready = Path(said).with_suffix(".new")
    ready.write_text(json.dumps(told))
    ready.rename(said)  # whoever reads it finds all of it
    if "hosts" in told:
        signal.pause()


def _open(names: Sequence[str], drops: str, port: int) -> list[dict[str, str]]:
    """Two hosts, linked; the paths of their namespaces. This thread is on the first then."""
    hosts: list[dict[str, int]] = []
    for name in names:
        unshare()
        socket.sethostname(name)
        # torch and we talk of IPv4 addresses here; one family leaves less to go wrong.
        with contextlib.suppress(OSError):
            Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
        kinds = ("net", "uts")
        hosts.append({k: os.open(f"/proc/thread-self/ns/{k}", os.O_RDONLY) for k in kinds})
    paths = [{k: f"/proc/{os.getpid()}/fd/{fd}" for k, fd in host.items()} for host in hosts]
    peer = f"peer name {INTERFACE} netns {paths[0]['net']}"
    _ip(f"link add {INTERFACE} type veth {peer}", *configuration(1, drops, port))
    _call("setns", hosts[0]["net"], _CLONE_NEWNET)
    _ip(*configuration(0, drops, port))
    return paths


def configuration(place: int, drops: str, port: int) -> list[str]:
    """What `ip` is told on the host in this place."""
    return [
        "link set lo up",
        f"addr add {address(place)}/24 dev {INTERFACE}",
        f"link set {INTERFACE} up",
        *(firewall(drops, port) if place == 0 else ()),
    ]


def firewall(drops: str, port: int) -> list[str]:
    """What makes a host drop what comes from the other: ``store``, what is for its store's port;
    ``ranks``, everything but that; empty for nothing.

    Routing rules, because they need no further program: what they send into a black hole is
    dropped without a word, as by a firewall's DROP.
    """
    comes = f"iif {INTERFACE} ipproto tcp"
    rules = {
        "": [],
        "store": [f"rule add pref 10 {comes} dport {port} blackhole"],
        "ranks": [
            f"rule add pref 10 {comes} dport {port} lookup local",
            f"rule add pref 20 {comes} blackhole",
        ],
    }[drops]
    # The table of local addresses is asked first of all; the rules must come before it.
    return [*rules, "rule add pref 100 lookup local", "rule del pref 0"] if rules else []


def _ip(*commands: str) -> None:
    """Run commands of `ip` on the host that this thread is on. Raises OSError, SubprocessError."""
    subprocess.run(
        ["ip", "-batch", "-"],
        input="\n".join(commands) + "\n",
        text=True,
        capture_output=True,
        check=True,
        timeout=_COMMAND_S,
    )
