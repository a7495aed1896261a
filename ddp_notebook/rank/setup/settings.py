"""The variables that torch reads on this rank: set as torchrun would, changed as asked, checked."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from ddp_notebook.model import Category, InitArguments
from ddp_notebook.rank.setup import rendezvous
from ddp_notebook.rank.setup.errors import StageError

if TYPE_CHECKING:
    from ddp_notebook.rank.setup.stages import Plan

BACKEND = "BACKEND"
"""Not a variable of torch's: which backend the rank asks for, to set it on one rank."""
TIMEOUT = "TIMEOUT"
"""Not a variable of torch's: the rank's own time-out in seconds."""

_before: dict[str, str | None] = {}
"""What earlier settings replaced, to be put back."""


def apply(plan: Plan) -> None:
    """Put back what an earlier set-up changed, set what torchrun sets, then `plan.settings`."""
    for name, value in _before.items():
        _set(name, value)
    _before.clear()
    base = {"RANK": str(plan.rank), "LOCAL_RANK": str(plan.rank)}
    base["WORLD_SIZE"] = base["LOCAL_WORLD_SIZE"] = str(plan.world_size)
    if plan.init_method != "file":
        base["MASTER_ADDR"], base["MASTER_PORT"] = plan.master_addr, str(plan.master_port)
    # Rank 0 of a script's own init must not open a second store beside the session's.
    agent_store = str(True) if plan.store == "session" else None
    _set("TORCHELASTIC_USE_AGENT_STORE", agent_store)
    os.environ.update(base)
    for name, value in plan.settings.items():
        _before[name] = os.environ.get(name)
        _set(name, value or None)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def backend(plan: Plan) -> str:
    """The backend this rank asks for."""
    return plan.settings.get(BACKEND) or plan.backend


def read(plan: Plan, backend_name: str) -> InitArguments:
    """With what this rank comes to the rendezvous, by its environment as it is now."""
    raw = {name: os.environ[name] for name in rendezvous.VARIABLES if name in os.environ}
    tcp = plan.init_method == "tcp"
    rank = rendezvous.number(raw.get("RANK"))
    timeout_s = float(plan.settings.get(TIMEOUT) or plan.timeout_s)
    if plan.init_method == "file":
        return InitArguments(
            "file",
            rank,
            rendezvous.number(raw.get("WORLD_SIZE")),
            path=plan.settings.get("STORE_PATH") or plan.store_path,
            backend=backend_name,
            timeout_s=timeout_s,
            raw=raw,
        )
    return InitArguments(
        plan.init_method,
        rank,
        rendezvous.number(raw.get("WORLD_SIZE")),
        plan.master_addr if tcp else raw.get("MASTER_ADDR", ""),
        plan.master_port if tcp else rendezvous.number(raw.get("MASTER_PORT")),
        backend=backend_name,
        timeout_s=timeout_s,
        hosts_store=rank == 0 and plan.store == "rank0",
        raw=raw,
    )


def check(came: InitArguments, plan: Plan) -> None:
    """Raises StageError for a value that cannot work on any machine."""
    names = ["RANK", "WORLD_SIZE"]
    if came.method == "env":
        names += ["MASTER_PORT", "MASTER_ADDR"]
    for name in names:
        text = came.raw.get(name, "")
        number = name == "MASTER_ADDR" or re.fullmatch(r"-?\d+", text)
        if not text or not number:
            what = f"{text!r}, which is not a number" if text else "not set"
            raise _invalid(f"{name} is {what}.", name, plan)
    assert came.rank is not None and came.world_size is not None
    if came.world_size < 1:
        raise _invalid(f"WORLD_SIZE is {came.world_size}: it must be 1 or more.", names[1], plan)
    if not 0 <= came.rank < came.world_size:
        raise _invalid(
            f"RANK is {came.rank}, but with WORLD_SIZE {came.world_size} ranks are "
            f"0 to {came.world_size - 1}.",
            "RANK",
            plan,
        )
    if came.method != "file" and not 0 < (came.master_port or 0) < 65536:
        raise _invalid(
            f"MASTER_PORT is {came.master_port}: ports are 1 to 65535.", "MASTER_PORT", plan
        )


def _invalid(cause: str, name: str, plan: Plan) -> StageError:
    right = {
        "RANK": str(plan.rank),
        "WORLD_SIZE": str(plan.world_size),
        "MASTER_ADDR": plan.master_addr,
        "MASTER_PORT": str(plan.master_port),
    }[name]
    remedy = f"Set {name}={right} on this rank, or leave it to the launcher: %ddp_init"
    return StageError(cause, remedy, Category.ENV_INVALID.value)
