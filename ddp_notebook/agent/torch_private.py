"""Every use of torch's private API, each checked before use. Tested against the pinned torch.

When a release changes one of them the test of this file fails, and the functions here fall
back to what they say.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

STORE_FUNCTIONS = ("_create_c10d_store", "_tcp_rendezvous_handler", "_env_rendezvous_handler")
"""Functions of `torch.distributed.rendezvous` that a rank is in while it reaches the store."""
GROUP_FUNCTIONS = ("_new_process_group_helper", "_store_based_barrier", "new_group")
"""Functions of `torch.distributed.distributed_c10d` that it is in while the ranks connect.

Read off the stack only. Without them a rank in set-up is taken for busy.
"""


_WATCHED = "__ddp_notebook_watched__"
_HELPER = "_new_process_group_helper"
_BY_GROUP = ("pg_map", "pg_names", "pg_backend_config", "pg_to_tag")
_HELPER_TAKES = ("group_size", "group_rank", "global_ranks_in_group", "store", "group_name")


def watch_groups(making: Callable[..., Any]) -> bool:
    """Have `making(store, name, rank, size, members)` see each process group made; once.

    Its `before()` is called before torch makes it, and `after(group)` gives what takes its
    place. What fails in them leaves torch's own group. False when this torch is different.
    """
    helper = getattr(distributed_c10d, _HELPER, None)
    if helper is None or not set(_HELPER_TAKES) <= set(inspect.signature(helper).parameters):
        return False
    if hasattr(helper, _WATCHED):
        return True
    signature = inspect.signature(helper)

    @functools.wraps(helper)
    def watched(*args: Any, **named: Any) -> Any:
        call = signature.bind(*args, **named).arguments
        size, rank, members, store, name = (call[key] for key in _HELPER_TAKES)
        made: Any = None
        with contextlib.suppress(Exception):  # the user's group matters more
            if rank is not None and rank >= 0:
                made = making(store, str(name), rank, size, members)
                made.before()
        group, prefixed = helper(*args, **named)
        if made is not None and isinstance(group, dist.ProcessGroup):
            with contextlib.suppress(Exception):
                group = made.after(group)
        return group, prefixed

    setattr(watched, _WATCHED, True)
    setattr(distributed_c10d, _HELPER, watched)
    return True


def take_place(group: Any, inner: Any) -> None:
    """Put `group` where torch has just put `inner`: in its maps, and by its name.

    Raises AttributeError or RuntimeError when this torch has no such maps; then nothing of
    `inner` has changed.
    """
    world: Any = distributed_c10d._world
    maps = [getattr(world, name) for name in _BY_GROUP]
    tagged = world.tags_to_pg
    kinds = dist.ProcessGroup.BackendType.__members__
    for entry in world.pg_backend_config[inner].split(","):
        device, _, name = entry.partition(":")
        kind = kinds.get(name.upper(), kinds["CUSTOM"])
        group._register_backend(
            torch.device(device), kind, inner._get_backend(torch.device(device))
        )
        group._set_default_backend(kind)
    group._set_group_name(inner.group_name)
    group._set_group_desc(inner.group_desc)
    for each in maps:
        if inner in each:
            each[group] = each.pop(inner)
    for groups in tagged.values():
        groups[:] = [group if each is inner else each for each in groups]
    # Functional collectives find a group by its name.
    unregister = getattr(distributed_c10d, "_unregister_process_group", None)
    register = getattr(distributed_c10d, "_register_process_group", None)
    if register is not None and unregister is not None:
        unregister(inner.group_name)
        register(inner.group_name, group)


def group_backend(group: Any) -> str:
    """The name of a group's backend: gloo, nccl; empty where torch does not tell."""
    name = getattr(group, "name", None)
    return str(name()) if callable(name) else ""


def is_forgotten(group: Any) -> bool:
    """True when torch does not know `group` any more: it was destroyed."""
    known = getattr(getattr(distributed_c10d, "_world", None), "pg_map", None)
    return known is not None and group not in known


def keep_from_compiler(function: Any) -> bool:
    """Have `torch.compile` run `function`, and what it calls, as it is; False if it cannot.

    The compiler would read code of ours that torch calls, and refuse it. Its public switch
    imports the compiler, which takes seconds.
    """
    known: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    action = getattr(known, "_FrameAction", None)
    if action is None or not hasattr(known, "set_code_exec_strategy"):
        return False
    strategy = known._FrameExecStrategy(action.SKIP, action.SKIP)
    known.set_code_exec_strategy(function.__code__, strategy)
    return True


def uses_cuda() -> bool:
    """True when this process has begun to use CUDA: to ask more would begin it."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def in_backward() -> bool:
    """True on a thread that runs a backward; False also where torch does not tell."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1


def without_hooks_while_scripting(is_ours: Callable[[Any], bool]) -> bool:
    """Have `torch.jit.script` not see forward pre-hooks that `is_ours`: it would compile them.

    False when this torch's `script` is another: it finds names by counting frames.
    """
    original = torch.jit.script
    if "_frames_up" not in inspect.signature(original).parameters:
        return False

    @functools.wraps(original)
    def script(obj: Any, *args: Any, **named: Any) -> Any:
        if len(args) > 1:
            args = (args[0], args[1] + 1, *args[2:])
        else:
            named["_frames_up"] = named.get("_frames_up", 0) + 1
        taken = _take_hooks(obj, is_ours)
        try:
            return original(obj, *args, **named)
        finally:
            for hooks, number, hook in taken:
                hooks[number] = hook

    torch.jit.script = script
    return True


def _take_hooks(module: Any, is_ours: Callable[[Any], bool]) -> list[tuple[Any, int, Any]]:
    taken = []
    for part in module.modules() if isinstance(module, torch.nn.Module) else ():
        hooks = part._forward_pre_hooks
        for number, hook in list(hooks.items()):
            if is_ours(hook):
                taken.append((hooks, number, hooks.pop(number)))
    return taken


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


def log_each_step(wrapped: Any) -> bool:
    """Have a DDP object's logger look at every step, not at one of many; False if it cannot."""
    sample = getattr(wrapped, "_set_ddp_runtime_logging_sample_rate", None)
    if sample is None:
        return False
    sample(1)
    return True


def logged_step_ns(wrapped: Any) -> tuple[int, int] | None:
    """What a DDP object's logger knows of a step: communication, and what ran beside backward.

    Of the step before the last one: DDP writes a step down when the next begins. None when
    this torch does not tell.
    """
    data: dict[str, Any] = getattr(wrapped, "_get_ddp_logging_data", dict)()
    both = data.get("backward_comm_time"), data.get("backward_compute_comm_overlap_time")
    return (int(both[0]), int(both[1])) if both[0] and both[1] is not None else None


def hook_names(wrapped: Any) -> list[str]:
    """The communication hooks that a DDP object was given."""
    hooks = getattr(wrapped, "_comm_hooks", ())
    return [getattr(each[0], "__name__", type(each[0]).__name__) for each in hooks]
