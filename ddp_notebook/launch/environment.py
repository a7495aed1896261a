"""The environment that a rank's process starts with."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


def rank_environment(
    rank: int, world_size: int, threads: int, extra: Mapping[str, str]
) -> dict[str, str]:
    """The variables torchrun would set, and what keeps torch on this host."""
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": str(threads),
        # The store is the session's: rank 0 of a user's own init must not open another.
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
