"""Every use of torch's private API, each checked before use. Tested against the pinned torch.

When a release changes one of them the test of this file fails, and the functions here fall
back to what they say.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

STORE_FUNCTIONS = ("_create_c10d_store", "_tcp_rendezvous_handler", "_env_rendezvous_handler")
"""Functions of `torch.distributed.rendezvous` that a rank is in while it reaches the store."""
GROUP_FUNCTIONS = ("_new_process_group_helper", "_store_based_barrier", "new_group")
"""Functions of `torch.distributed.distributed_c10d` that it is in while the ranks connect.

Read off the stack only. Without them a rank in set-up is taken for busy.
"""


def forget_groups() -> None:
    """Forget every process group, also half-made ones after a failed init.

    `destroy_process_group` does nothing when init failed half way; torch then counts group
    names on, and this rank waits for keys that its peers never write. Falls back to
    `destroy_process_group` alone.
    """
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):
            dist.destroy_process_group()
    world: Any = getattr(distributed_c10d, "_world", None)
    if world is None:
        return
    for name in (
        "pg_map",
        "pg_names",
        "pg_group_ranks",
        "pg_backend_config",
        "pg_to_tag",
        "tags_to_pg",
        "pg_coalesce_state",
    ):
        members = getattr(world, name, None)
        if members is not None:
            members.clear()
    if hasattr(world, "group_count"):
        world.group_count = 0
    update = getattr(distributed_c10d, "_update_default_pg", None)
    if update is not None:
        update(None)
    unregister = getattr(distributed_c10d, "_unregister_all_process_groups", None)
    if unregister is not None:
        unregister()


def set_group_timeout(timeout: timedelta) -> bool:
    """Change the default group's timeout for operations issued from now on; False if it cannot."""
    set_timeout = getattr(distributed_c10d, "_set_pg_timeout", None)
    if set_timeout is None:
        return False
    set_timeout(timeout)
    return True
