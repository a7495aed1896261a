"""The environment variables that a child of the fork server starts with."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from ddp_notebook.launch.placement import Placement


def torchrun_variables(
    rank: int,
    world_size: int,
    master: tuple[str, int] | None,
    *,
    agent_store: bool,
    local: tuple[int, int] | None = None,
) -> dict[str, str]:
    """Return what torchrun sets for one rank of a run; an empty value means unset.

    `local` is the rank's index on its host and how many are there; None: all are on one. `master`
    is the address of the store, None where ranks meet at a file. `agent_store`: another process
    hosts the store, as torchrun's agent does, so rank 0 must not open a second one.
    """
    local_rank, local_world_size = local or (rank, world_size)
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "TORCHELASTIC_USE_AGENT_STORE": str(True) if agent_store else "",
    }
    if master is not None:
        variables["MASTER_ADDR"], variables["MASTER_PORT"] = master[0], str(master[1])
    return variables


def torchrun_agents_variables(
    rank: int, world_size: int, group: tuple[int, int] = (0, 1)
) -> dict[str, str]:
    """Return the further variables that torchrun sets for a script's rank, never restarted.

    `group` is the index of its host, and how many hosts there are.
    """
    return {
        "GROUP_RANK": str(group[0]),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "GROUP_WORLD_SIZE": str(group[1]),
        "ROLE_WORLD_SIZE": str(world_size),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `extra`, without the notebook kernel's own variables."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("JPY_")}
    return {**inherited, **extra}


def rank_environment(
    rank: int, placement: Placement, threads: int, extra: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that torchrun would set for a rank, and those that a notebook needs."""
    group_rank, groups = placement.group(rank)
    local = placement.local(rank)
    environment = {
        **torchrun_variables(rank, placement.world_size, None, agent_store=True, local=local),
        **({"GROUP_RANK": str(group_rank), "GROUP_WORLD_SIZE": str(groups)} if groups > 1 else {}),
        "OMP_NUM_THREADS": str(threads),
        # Without it debugpy, which ipykernel loads, warns in each rank that frozen modules may make
        # a debugger miss breakpoints.
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        # Figures appear in the notebook, also when matplotlib is first loaded in the rank.
        "MPLBACKEND": os.environ.get("MPLBACKEND", "module://matplotlib_inline.backend_inline"),
    }
    return {**environment, **extra}


def loopback_interface() -> str:
    """Return the name of the loopback interface; empty if none has a usual name."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), "")
