"""The options of `%ddp_init`, checked before anything starts."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ddp_notebook.errors import UsageMistake
from ddp_notebook.launch.addresses import LOOPBACK
from ddp_notebook.launch.host_facts import cores
from ddp_notebook.launch.placement import MOST_RANKS, HostSpec, Placement, place
from ddp_notebook.model import parse_ranks

BACKENDS = ("auto", "gloo", "nccl")
DEVICES = ("auto", "cpu", "cuda")
INIT_METHODS = ("env", "tcp", "file")
LAUNCHERS = ("auto", "fork", "process")
STORES = ("session", "rank0")

Settings = Mapping[int, Mapping[str, str]]
"""Environment overrides of single ranks: rank to variable to value; an empty value unsets it."""


@dataclass(frozen=True)
class InitOptions:
    """The options of `%ddp_init`, each as the user writes it.

    `timeout_s` is how long setup may take before it fails with an explanation.
    `threads_per_rank` 0 means cores divided by ranks, at least 1. `master_port` 0 means
    that the system chooses a free one. `store` is session (it hosts the store, as torchrun's
    agent does) or rank0 (as in a plain script). With `share_gpu` ranks share GPUs by NCCL.
    `settings` change the environment of single ranks; with `step` setup stops before the first
    stage. Without `hosts` ranks are on this machine; else `python` and `folder` are the interpreter
    and the current folder there, empty for the same as here, and a host that has heard nothing of
    the notebook for `give_up_after_s` ends its ranks. Raises UsageMistake for values that cannot
    work.
    """

    world_size: int = 4
    backend: str = "auto"
    device: str = "auto"
    timeout_s: float = 60.0
    master_addr: str = LOOPBACK
    master_port: int = 0
    init_method: str = "env"
    gpus: tuple[str, ...] = ()
    share_gpu: bool = False
    launcher: str = "auto"
    threads_per_rank: int = 0
    store: str = "session"
    settings: Settings = field(default_factory=dict)
    step: bool = False
    hosts: tuple[HostSpec, ...] = ()
    python: str = ""
    folder: str = ""
    give_up_after_s: float = 120.0

    def __post_init__(self) -> None:
        if self.hosts:
            self._check_hosts()
        else:
            check_world_size(self.world_size)
        check_choice("--backend", self.backend, BACKENDS)
        check_choice("--device", self.device, DEVICES)
        check_choice("--init-method", self.init_method, INIT_METHODS)
        check_choice("--launcher", self.launcher, LAUNCHERS)
        check_choice("--store", self.store, STORES)
        if not 0 <= self.master_port <= 65535:
            raise UsageMistake(
                f"--master-port {self.master_port} is not a port: ports are 1 to 65535. "
                "Leave it out and a free one is chosen."
            )
        if re.fullmatch(r"[^:]+:\d+", self.master_addr):
            host, _, port = self.master_addr.partition(":")
            raise UsageMistake(
                f"--master-addr is an address without a port. Type: --master-addr {host} "
                f"--master-port {port}"
            )
        if self.timeout_s <= 0:
            raise UsageMistake("--timeout is in seconds and must be more than 0, such as 60.")
        if self.threads_per_rank < 0:
            raise UsageMistake("--threads-per-rank must be 1 or more.")
        absent = [rank for rank in self.settings if not 0 <= rank < self.world_size]
        if absent:
            raise UsageMistake(
                f"--set names rank {absent[0]}: world size is {self.world_size}, so ranks are "
                f"0 to {self.world_size - 1}."
            )

    def _check_hosts(self) -> None:
        """Raise UsageMistake for options that cannot work on other hosts."""
        if self.world_size < 1:
            check_world_size(self.world_size)
        place(self.world_size, self.hosts)
        if self.init_method == "file":
            raise UsageMistake(
                "--init-method file needs a file that all hosts see. Leave it out with --hosts."
            )
        if self.launcher == "process":
            raise UsageMistake("On other hosts ranks are forked: leave --launcher out.")
        if self.give_up_after_s < 10:
            raise UsageMistake("--give-up-after is in seconds, 10 or more, such as 120.")

    @property
    def placement(self) -> Placement:
        """Which rank is on which host."""
        return place(self.world_size, self.hosts)

    @property
    def names_master(self) -> bool:
        """True where the user has named the address of the store."""
        return not (self.hosts and self.master_addr == LOOPBACK)

    def same_processes(self, other: InitOptions) -> bool:
        """Return whether ranks started for `other` can be set up with these options."""
        return (self.world_size, self.gpus) == (other.world_size, other.gpus) and not (
            self.other_kind(other)
        )

    def other_kind(self, other: InitOptions) -> tuple[str, ...]:
        """Return the options that would make each process differ from one started for `other`."""
        options = {
            "device": "--device",
            "share_gpu": "--share-gpu",
            "launcher": "--launcher",
            "threads_per_rank": "--threads-per-rank",
            "hosts": "--hosts",
            "python": "--python",
            "folder": "--folder",
        }
        return tuple(
            option
            for name, option in options.items()
            if getattr(self, name) != getattr(other, name)
        )

    def same_store(self, other: InitOptions) -> bool:
        """Return whether the session's store for `other` serves these options."""
        names = ("init_method", "master_addr", "master_port")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    @property
    def threads(self) -> int:
        """Intra-op threads of each rank."""
        return self.threads_per_rank or max(1, cores() // self.world_size)

    def notes(self) -> tuple[str, ...]:
        """Return what the user should know about these options on this machine."""
        notes = []
        if self.world_size > cores() and not self.hosts:
            notes.append(
                f"{self.world_size} ranks share {cores()} CPU cores: fine for learning, "
                "but timings are not meaningful."
            )
        if self.init_method == "file" or not self.names_master:
            return tuple(notes)
        where = self.master_addr
        if self.store == "rank0" or where in ("0.0.0.0", "::"):  # noqa: S104  # compared, not bound
            where = "all addresses of this host"
        at = set()
        if self.store != "rank0":  # else it does not matter what is looked up, perhaps slowly
            with contextlib.suppress(OSError, UnicodeError):  # setup will say so
                found = socket.getaddrinfo(self.master_addr, None, type=socket.SOCK_STREAM)
                at = {ipaddress.ip_address(each[4][0]) for each in found}
        if self.store == "rank0" or not all(address.is_loopback for address in at):
            notes.append(
                f"The store listens on {where}, and torch's store does not check who connects: "
                "whoever can connect to it can disturb the ranks."
            )
        return tuple(notes)


def parse_settings(texts: Iterable[str], world_size: int) -> Settings:
    """Read texts such as ``1:MASTER_PORT=23457``. Raises UsageMistake."""
    settings: dict[int, dict[str, str]] = {}
    for text in texts:
        where, colon, rest = text.partition(":")
        name, equals, value = rest.partition("=")
        if not colon or not equals or not name.isidentifier():
            raise UsageMistake(
                f"--set {text!r} is not RANKS:NAME=value. Such as: --set 1:MASTER_PORT=23457 "
                "(--set 1:MASTER_PORT= unsets it)"
            )
        try:
            ranks = parse_ranks(where, world_size)
        except ValueError as error:
            raise UsageMistake(f"--set {text!r}: {error}") from None
        for rank in ranks:
            settings.setdefault(rank, {})[name] = value
    return settings


def check_choice(option: str, value: str, allowed: Iterable[str]) -> None:
    """Raise UsageMistake for a value that `option` does not have."""
    if value not in allowed:
        raise UsageMistake(f"{option} must be one of {', '.join(allowed)}, not {value!r}.")


def check_world_size(world_size: int, command: str = "%ddp_init") -> None:
    """Raise UsageMistake, with `command` to type instead, for a number of ranks that cannot be."""
    if world_size < 1:
        raise UsageMistake(
            f"World size {world_size} is too small: it must be 1 or more. "
            f"Type: {command} --world-size 4"
        )
    if world_size > MOST_RANKS:
        raise UsageMistake(
            f"World size {world_size:,} is too large: one machine runs at most {MOST_RANKS} "
            f"ranks. Type: {command} --world-size 4"
        )
