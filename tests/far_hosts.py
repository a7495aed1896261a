"""Hosts of their own on this machine: network, name, pids, /tmp and home apart, each with an sshd.

A host is a set of Linux namespaces, so only root makes them. Pids of two hosts collide at once, as
those of two containers do, and the second host's monotonic clock is far ahead of this machine's.
All hosts hang on one switch, which is a namespace too: when this process ends, however it ends,
the kernel takes away processes, mounts and interfaces.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from support import eventually, lacking

SSHD = "/usr/sbin/sshd"
AHEAD_S = 100_000
"""How far the monotonic clock of every host but the first is ahead."""
_NEEDED = (SSHD, "ssh", "ssh-keygen", "ip", "unshare", "nsenter", "mount")
_REPOSITORY = Path(__file__).parents[1]
_SERVER = """\
HostKey {folder}/host
PidFile none
AuthorizedKeysFile {folder}/user.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PrintMotd no
MaxStartups 100:30:200
SetEnv PYTHONPATH={repository}
"""
_CLIENT = """\
Host {name}
  HostName {address}
"""
_CLIENTS = """\
Host *
  User root
  IdentityFile {folder}/user
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known
  StrictHostKeyChecking accept-new
  LogLevel ERROR
"""
_HOST = """\
set -e
hostname {name}
{mounts}
exec 9>&1 >>{folder}/{name}/log 2>&1
{sshd} -f {folder}/sshd
echo up >&9
exec 9>&-
exec sleep infinity
"""


def need_far_hosts() -> None:
    """Skip where such hosts cannot be; in CI that is a failure."""
    if os.geteuid() != 0:
        lacking("no far hosts: only root makes namespaces")
    missing = [program for program in _NEEDED if shutil.which(program) is None]
    if missing:
        lacking(f"no {', '.join(missing)}: apt-get install openssh-server iproute2")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class FarHosts:
    """Hosts that `ssh -F config NAME` reaches. Their files are in `folder`/NAME."""

    def __init__(self, folder: Path, names: Sequence[str] = ("far-a", "far-b")) -> None:
        self.names = tuple(names)
        self.folder = folder
        self.config = folder / "config"
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._within: dict[str, int] = {}
        """By host, the first process of its namespaces, as this machine knows it."""
        for name in ("host", "user"):
            key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(key, check=True)
        (folder / "sshd").write_text(_SERVER.format(folder=folder, repository=_REPOSITORY))
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        switch = "ip link add hub0 type bridge; ip link set hub0 up; echo up; exec sleep infinity"
        self._start("", ["unshare", "--net", "sh", "-ec", switch])
        self._network = self._free_network()
        self._write_names()
        for host, name in enumerate(self.names):
            script = _HOST.format(
                name=name, mounts=self._mounts(name), sshd=SSHD, folder=self.folder
            )
            ahead = ["--time", "--monotonic", str(AHEAD_S)] if host else []
            kinds = ["--net", "--uts", "--mount", "--ipc", "--pid", "--mount-proc", *ahead]
            self._start(name, ["unshare", *kinds, "--fork", "--kill-child", "sh", "-c", script])
        # The link to this machine first. Interfaces go with the switch's namespace.
        near = f"dn{self._within['']}"
        _ip(
            f"link add {near} type veth peer name near netns {self._within['']}",
            f"addr add {self._network}.1/24 dev {near}",
            f"link set {near} up",
        )
        self._plug("near")
        for name in self.names:
            pids = self._within[name], self._within[""]
            _ip(f"link add eth0 netns {pids[0]} type veth peer name {name} netns {pids[1]}")
            own = f"addr add {self.address(name)}/24 dev eth0"
            _ip("link set lo up", own, "link set eth0 up", within=pids[0])
            self._plug(name)

    def _start(self, name: str, command: Sequence[str]) -> None:
        holder = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        self._holders[name] = holder
        assert holder.stdout is not None
        said = holder.stdout.readline()
        assert said == b"up\n", f"host {name!r} is not up: {(self.folder / name / 'log')}"
        # `unshare --fork` stays as the parent of the first process of a host.
        children = psutil.Process(holder.pid).children() if name else []
        self._within[name] = children[0].pid if children else holder.pid

    def _free_network(self) -> str:
        """The first three bytes of an address range for benchmarks (RFC 2544) not in use here."""
        taken = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True).stdout
        numbers = (self._within[""] + more for more in range(512))
        networks = (f"198.{18 + number // 256 % 2}.{number % 256}" for number in numbers)
        return next(network for network in networks if f" {network}." not in taken)

    def _write_names(self) -> None:
        lines = [f"{self.address(name)} {name}" for name in self.names]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        clients = [_CLIENT.format(name=n, address=self.address(n)) for n in self.names]
        self.config.write_text("".join([*clients, _CLIENTS.format(folder=self.folder)]))

    def _mounts(self, name: str) -> str:
        """The commands that give a host its own files, and let it see Python and this package."""
        lines = ["mount -t tmpfs none /run", "mkdir /run/sshd", "mount -t tmpfs none /dev/shm"]
        kept = {self.folder, _REPOSITORY, *map(Path, (sys.prefix, sys.base_prefix))}
        for own, place in (("tmp", Path("/tmp")), ("home", Path.home())):
            instead = self.folder / name / own
            instead.mkdir(parents=True)
            for path in sorted(path for path in kept if path.is_relative_to(place)):
                seen = instead / path.relative_to(place)
                seen.mkdir(parents=True, exist_ok=True)
                lines.append(f"mount --bind {shlex.quote(str(path))} {shlex.quote(str(seen))}")
            lines.append(f"mount --rbind {shlex.quote(str(instead))} {place}")
        return "\n".join([*lines, f"mount --bind {self.folder}/hosts /etc/hosts"])

    def _plug(self, port: str) -> None:
        _ip(f"link set {port} master hub0", f"link set {port} up", within=self._within[""])

    # -- for tests ---------------------------------------------------------------------------

    @property
    def ssh(self) -> str:
        """The command that reaches them."""
        return f"ssh -F {self.config}"

    def address(self, name: str) -> str:
        """The address of a host; this machine's own towards them for the empty name."""
        return f"{self._network}.{10 + self.names.index(name) if name else 1}"

    def tmp(self, name: str) -> Path:
        """A host's /tmp, as this machine sees it."""
        return self.folder / name / "tmp"

    def run(self, name: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command on a host, as its root."""
        target = ["nsenter", f"--target={self._within[name]}", "--all", "--", *command]
        return subprocess.run(target, capture_output=True, text=True, timeout=30)

    def processes(self, name: str) -> dict[int, str]:
        """What runs on a host beside its first process and its sshd: pid here, command."""
        found = {}
        for process in psutil.Process(self._within[name]).children(recursive=True):
            try:
                command = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if command and not command.startswith(f"sshd: {SSHD}"):
                found[process.pid] = command
        return found

    def left(self, name: str) -> list[str]:
        """What a session has left on a host: processes, and folders in its /tmp."""
        folders = self.tmp(name).glob("ddp_notebook-*")
        return [*self.processes(name).values(), *(str(folder) for folder in folders)]

    @property
    def holders(self) -> list[int]:
        """The processes here that hold them open."""
        return [holder.pid for holder in self._holders.values()]

    def nothing_left(self, within_s: float = 15.0) -> None:
        """Wait until no host has anything of a session. Raises AssertionError."""
        self.nothing_left_on(*self.names, within_s=within_s)

    def nothing_left_on(self, *names: str, within_s: float = 15.0) -> None:
        """The same of some hosts."""
        left: list[str] = []

        def nothing() -> bool:
            left[:] = [f"{name}: {what}" for name in names for what in self.left(name)]
            return not left

        try:
            eventually(nothing, within_s)
        except AssertionError:
            raise AssertionError(f"left behind on hosts: {left}") from None

    @contextmanager
    def cut(self, name: str) -> Iterator[None]:
        """A context in which what is sent to a host or by it is lost, without a word."""
        _ip(f"link set {name} nomaster", within=self._within[""])
        try:
            yield
        finally:
            self._plug(name)

    def close(self) -> None:
        """Take the hosts away."""
        for holder in self._holders.values():
            holder.kill()
            holder.communicate()
        self._holders.clear()


def _ip(*commands: str, within: int = 0) -> None:
    """Run commands of `ip`, within the network of a process."""
    enter = ["nsenter", f"--target={within}", "--net"] if within else []
    done = subprocess.run(
        [*enter, "ip", "-batch", "-"], input="\n".join(commands), capture_output=True, text=True
    )
    assert done.returncode == 0, f"ip {commands}: {done.stderr}"
