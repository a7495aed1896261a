"""What `%ddp_init` was asked for, checked before anything starts."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from ddp_notebook.errors import UsageMistake

MAX_WORLD_SIZE = 256
"""More ranks than this on one machine is a slip of the finger."""

BACKENDS = ("auto", "gloo", "nccl")
DEVICES = ("auto", "cpu", "cuda")
INIT_METHODS = ("env", "tcp", "file")
LAUNCHERS = ("auto", "fork", "process")


@dataclass(frozen=True)
class InitOptions:
    """The options of `%ddp_init`, each as the user writes it.

    `timeout_s` is how long set-up may take before it is given up and explained.
    `threads_per_rank` 0 means cores divided by ranks, at least 1. `master_port` 0 means
    that the system chooses a free one. Raises UsageMistake for values that cannot work.
    """

    world_size: int = 4
    backend: str = "auto"
    device: str = "auto"
    timeout_s: float = 60.0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    init_method: str = "env"
    gpus: tuple[str, ...] = ()
    launcher: str = "auto"
    threads_per_rank: int = 0

    def __post_init__(self) -> None:
        _check_world_size(self.world_size)
        for option, value, allowed in (
            ("--backend", self.backend, BACKENDS),
            ("--device", self.device, DEVICES),
            ("--init-method", self.init_method, INIT_METHODS),
            ("--launcher", self.launcher, LAUNCHERS),
        ):
            if value not in allowed:
                raise UsageMistake(f"{option} is one of {', '.join(allowed)}, not {value!r}.")
        if not 0 <= self.master_port <= 65535:
            raise UsageMistake(
                f"--master-port {self.master_port} is not a port: ports are 1 to 65535. "
                "Leave it out and a free one is chosen."
            )
        if self.timeout_s <= 0:
            raise UsageMistake("--timeout is in seconds and must be more than 0, such as 60.")
        if self.threads_per_rank < 0:
            raise UsageMistake("--threads-per-rank must be 1 or more.")
        repeated = {gpu for gpu in self.gpus if self.gpus.count(gpu) > 1}
        if repeated and self.backend == "nccl":
            raise UsageMistake(
                f"--gpus names GPU {sorted(repeated)[0]} twice, and NCCL wants a GPU of its own "
                "for every rank. Use --backend gloo to share."
            )

    @property
    def threads(self) -> int:
        """Intra-op threads of each rank."""
        return self.threads_per_rank or max(1, cores() // self.world_size)

    def notes(self) -> tuple[str, ...]:
        """What the user should know about these options on this machine."""
        if self.world_size > cores():
            return (
                f"{self.world_size} ranks share {cores()} CPU cores: fine for learning, "
                "but timings say little.",
            )
        return ()


def cores() -> int:
    """CPU cores this process may use: by its affinity, and by the quota of its container."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    return max(1, min(allowed, math.ceil(_container_quota(Path("/sys/fs/cgroup/cpu.max")))))


def _container_quota(cpu_max: Path) -> float:
    """Cores a cgroup (version 2) may use; infinity without a limit. Its form: ``200000 100000``."""
    try:
        quota, period = cpu_max.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no cgroup, or "max"
        return 1e9


def _check_world_size(world_size: int) -> None:
    if world_size < 1:
        raise UsageMistake(
            f"World size {world_size} makes no sense: it is the number of ranks, 1 or more. "
            "Type: %ddp_init --world-size 4"
        )
    if world_size > MAX_WORLD_SIZE:
        raise UsageMistake(
            f"World size {world_size:,} is more than one machine can hold: at most "
            f"{MAX_WORLD_SIZE} ranks here. Type: %ddp_init --world-size 4"
        )
