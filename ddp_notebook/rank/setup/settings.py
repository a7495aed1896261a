"""The variables that torch reads on this rank: set as torchrun would, changed as asked, checked."""

from __future__ import annotations

import os
import re

from ddp_notebook.launch.environment import torchrun_variables
from ddp_notebook.model import Category, InitArguments
from ddp_notebook.rank.calls import SetUpPlan
from ddp_notebook.rank.setup import rendezvous
from ddp_notebook.rank.setup.errors import StageError

BACKEND = "BACKEND"
"""Not a variable of torch's: the backend that the rank requests, to set it on one rank."""
TIMEOUT = "TIMEOUT"
"""Not a variable of torch's: the rank's own timeout in seconds."""


class Settings:
    """The changes that setups made to this rank's environment."""

    def __init__(self) -> None:
        self._before: dict[str, str | None] = {}
        """The values that earlier settings replaced, to be restored."""

    def apply(self, plan: SetUpPlan) -> None:
        """Restore what an earlier setup changed, set torchrun's, then `plan.settings`."""
        for name, value in self._before.items():
            _set(name, value)
        self._before.clear()
        master = (plan.master_addr, plan.master_port) if plan.init_method != "file" else None
        # Rank 0 of a script's own init must not open a second store beside the session's.
        agent_store = plan.store == "session"
        torchruns = torchrun_variables(
            plan.rank, plan.world_size, master, agent_store=agent_store, local=plan.local
        )
        for name, value in torchruns.items():
            _set(name, value or None)
        _set("OMP_NUM_THREADS", str(plan.threads))
        for name, value in plan.settings.items():
            self._before[name] = os.environ.get(name)
            _set(name, value or None)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def read(plan: SetUpPlan) -> InitArguments:
    """The init arguments of this rank, by its environment as it is now."""
    raw = {name: os.environ[name] for name in rendezvous.VARIABLES if name in os.environ}
    rank = rendezvous.number(raw.get("RANK"))
    in_file = plan.init_method == "file"
    by_method: dict[str, tuple[str, int | None]] = {
        "env": (raw.get("MASTER_ADDR", ""), rendezvous.number(raw.get("MASTER_PORT"))),
        "tcp": (plan.master_addr, plan.master_port),
    }
    address, port = by_method.get(plan.init_method, ("", None))
    return InitArguments(
        plan.init_method,
        rank,
        rendezvous.number(raw.get("WORLD_SIZE")),
        address,
        port,
        path=(plan.settings.get("STORE_PATH") or plan.store_path) if in_file else "",
        backend=plan.settings.get(BACKEND) or plan.backend,
        timeout_s=float(plan.settings.get(TIMEOUT) or plan.timeout_s),
        hosts_store=rank == 0 and plan.store == "rank0" and not in_file,
        raw=raw,
    )


def check(arguments: InitArguments, plan: SetUpPlan) -> None:
    """Raises StageError for a value that cannot work on any machine."""
    names = ["RANK", "WORLD_SIZE"]
    if arguments.method == "env":
        names += ["MASTER_PORT", "MASTER_ADDR"]
    for name in names:
        text = arguments.raw.get(name, "")
        number = name == "MASTER_ADDR" or re.fullmatch(r"-?\d+", text)
        if not text or not number:
            what = f"{text!r}, but must be a number" if text else "not set"
            raise _invalid(f"{name} is {what}.", name, plan)
    assert arguments.rank is not None and arguments.world_size is not None
    if arguments.world_size < 1:
        raise _invalid(
            f"WORLD_SIZE is {arguments.world_size}, but must be at least 1.", names[1], plan
        )
    if not 0 <= arguments.rank < arguments.world_size:
        raise _invalid(
            f"RANK is {arguments.rank}, but with WORLD_SIZE {arguments.world_size} it must be "
            f"0 to {arguments.world_size - 1}.",
            "RANK",
            plan,
        )
    if arguments.method != "file" and not 0 < (arguments.master_port or 0) < 65536:
        raise _invalid(
            f"MASTER_PORT is {arguments.master_port}, but ports go from 1 to 65535.",
            "MASTER_PORT",
            plan,
        )


def _invalid(cause: str, name: str, plan: SetUpPlan) -> StageError:
    if name == "MASTER_PORT":
        remedy = f"Leave {name} to the launcher, which finds a free port at each start: %ddp_init"
        return StageError(cause, remedy, Category.ENV_INVALID.value)
    right = {
        "RANK": str(plan.rank),
        "WORLD_SIZE": str(plan.world_size),
        "MASTER_ADDR": plan.master_addr,
    }[name]
    remedy = f"Set {name}={right} on this rank, or leave it to the launcher: %ddp_init"
    return StageError(cause, remedy, Category.ENV_INVALID.value)
