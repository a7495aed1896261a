"""A rank's process as the system knows it: its launch parameters, and who started it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ddp_notebook.launch.process_groups import stat_fields

_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
"""torch's, and those of srun, Open MPI and MPICH."""


class LaunchParameters(NamedTuple):
    """The rank and world size in a process's first environment, and the variable of the rank."""

    variable: str
    rank: int
    world_size: int

    @property
    def by_scheduler(self) -> bool:
        """Set by srun or mpirun: a launcher of ranks on each host then has it too."""
        return self.variable != _VARIABLES[0][0]


def environment(pid: int) -> dict[str, str]:
    """The environment with which a process of this user's was started. Raises OSError."""
    lines = read(pid, "environ").split("\0")
    return {name: value for name, is_there, value in (e.partition("=") for e in lines) if is_there}


def other_user(pid: int) -> int | None:
    """The id of the user whose process it is; None of one of this user's, and of none."""
    try:
        user = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None
    return user if user != os.geteuid() else None


def launch_parameters(values: Mapping[str, str]) -> LaunchParameters | None:
    """The rank that the variables of a launcher name; None where they name none."""
    for rank, size in _VARIABLES:
        numbers = values.get(rank, "")[:9], values.get(size, "")[:9]
        if all(text.isascii() and text.isdigit() for text in numbers):
            return LaunchParameters(rank, int(numbers[0]), int(numbers[1]))
    return None


def in_its_container(pid: int) -> tuple[int, str]:
    """The number of a process in its own pid namespace, and that namespace. Raises OSError."""
    lines = read(pid, "status").splitlines()
    numbers = next((line.split()[1:] for line in lines if line.startswith("NSpid:")), [str(pid)])
    return int(numbers[-1]), str(Path(f"/proc/{pid}/ns/pid").readlink())


def has_torch(pid: int) -> bool:
    """True of a process of this user's that has loaded torch."""
    try:
        return "libtorch" in read(pid, "maps", 1 << 24)
    except OSError:
        return False


def launcher(pid: int) -> int:
    """The process that started a rank, or started the shells and wrappers around it."""
    return parent([pid, *around(pid)][-1])


def around(pid: int) -> list[int]:
    """Parents of a rank that have its launch parameters but are no rank: shells, wrappers."""
    found: list[int] = []
    try:
        own = launch_parameters(environment(pid))
        above = parent(pid)
        while own and len(found) < 8:
            if launch_parameters(environment(above)) != own or has_torch(above):
                break
            found.append(above)
            above = parent(above)
    except OSError:
        pass
    return found


def parent(pid: int) -> int:
    """Return the parent of a process. Raises OSError for an unknown pid."""
    return int(stat_fields(Path(f"/proc/{pid}/stat"))[1])


def children(pid: int) -> tuple[int, ...] | None:
    """The processes that the main thread of a process has started; None where unknown."""
    try:
        return tuple(map(int, read(pid, f"task/{pid}/children").split()))
    except (OSError, ValueError):
        return None


def read(pid: int, name: str, most_bytes: int = 1 << 20) -> str:
    """Return the text of a process's file in /proc, up to a bound. Raises OSError without one."""
    with Path(f"/proc/{pid}/{name}").open("rb") as stream:
        return stream.read(most_bytes).decode(errors="replace")
