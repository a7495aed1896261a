"""The environment variables that a child of the fork server starts with."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `extra`, without the notebook kernel's own variables."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("JPY_")}
    return {**inherited, **extra}


def rank_environment(
    rank: int, world_size: int, threads: int, extra: Mapping[str, str]
) -> dict[str, str]:
    """The variables that torchrun would set for a rank, and those that a notebook needs."""
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": str(threads),
        # The session hosts the store: rank 0 of a user's own init must not open a second one.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        # Figures appear in the notebook, also when matplotlib is first loaded in the rank.
        "MPLBACKEND": os.environ.get("MPLBACKEND", "module://matplotlib_inline.backend_inline"),
    }
    return {**environment, **extra}


def loopback_interface() -> str:
    """Name of the loopback interface, empty when there is none by a usual name."""
    names = (
        {name for _, name in socket.if_nameindex()} if hasattr(socket, "if_nameindex") else set()
    )
    return next((name for name in ("lo", "lo0") if name in names), "")
