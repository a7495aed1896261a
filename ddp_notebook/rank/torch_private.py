"""Every use of torch's private API, each checked before use. Tested against the pinned torch.

When a release changes one of them the test of this file fails, and the functions here fall
back to what they say.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ddp_notebook.rank.inspect.objects import objects_of

_WATCHED = "__ddp_notebook_watched__"
_HELPER = "_new_process_group_helper"
_BY_GROUP = ("pg_map", "pg_names", "pg_backend_config", "pg_to_tag", "pg_group_ranks")
_HELPER_TAKES = {
    "store": "store",
    "group_name": "name",
    "group_rank": "rank",
    "group_size": "size",
    "global_ranks_in_group": "members",
    "backend": "backend",
    "timeout": "timeout",
}
"""The arguments of the helper, and their names in `NewGroup`."""
_MAY_TAKE = {"group_desc": "called"}
"""Its further arguments in newer versions of torch."""


@dataclass(frozen=True, slots=True, eq=False)
class NewGroup:
    """With what torch makes a group. `rank` is within it, `members` is empty for the default.

    `called` is what the user, or a mesh, calls it; None for nothing. Ranks that are no members
    have to call for it too, with None as their `rank`.
    """

    store: Any
    name: str
    rank: int | None
    size: int
    members: Sequence[int]
    backend: str
    timeout: timedelta
    called: str | None = None

    @property
    def has_me(self) -> bool:
        """True when this rank is a member."""
        return self.rank is not None and self.rank >= 0


def forget_rules() -> bool:
    """Empty what torch's compiler remembers, as the first group does; False if it does not.

    In the process that ranks are forked from: emptied in each of them, it copies 1 MB of pages.
    """
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    forget = getattr(rules, "clear_lru_cache", None)
    if forget is None:
        return False
    forget()
    return True


def watch_groups(making: Callable[[NewGroup], Any]) -> None:
    """Have `making` see each process group made, those that this rank is not in too; once.

    Its `before()` is called before torch makes it, `after(group)` gives what takes its place,
    and `ended()` is called whatever came of it. What fails in them leaves torch's own group,
    and so does a torch that is different.
    """
    # `init_process_group` and `new_group`, through which subgroups and meshes are made too, look
    # this function up in their module at each call. To replace it there shows each group with its
    # store and its name, which the public functions are not given. What `split_group` makes does
    # not come by here: see `split_off`.
    helper = getattr(distributed_c10d, _HELPER, None)
    if helper is None or hasattr(helper, _WATCHED):
        return
    signature = inspect.signature(helper)
    if not set(_HELPER_TAKES) <= set(signature.parameters):
        return

    @functools.wraps(helper)
    def watched(*args: Any, **named: Any) -> Any:
        call = signature.bind(*args, **named).arguments
        made: Any = None
        with contextlib.suppress(Exception):  # the user's group matters more
            takes = {**_HELPER_TAKES, **_MAY_TAKE}
            arguments: Any = {ours: call.get(theirs) for theirs, ours in takes.items()}
            made = making(NewGroup(**arguments))
            made.before()
        try:
            group, prefixed = helper(*args, **named)
            if made is not None and isinstance(group, dist.ProcessGroup):
                with contextlib.suppress(Exception):
                    group = made.after(group)
        finally:
            if made is not None:
                made.ended()
        return group, prefixed

    setattr(watched, _WATCHED, True)
    setattr(distributed_c10d, _HELPER, watched)


@contextlib.contextmanager
def groups_counted_from(number: int) -> Iterator[None]:
    """A context in which torch numbers the groups it makes from `number`, as on no other rank.

    For groups that only their members make. torch 2.15 names these by their members and by how many
    groups the process has made. Where that differs among members they wait for each other forever,
    and so do all ranks in the next `new_group`, whose name is this count.
    """
    world: Any = distributed_c10d._world
    before = world.group_count
    # By the counter, as torch takes no name for a group: see above for what depends on it.
    world.group_count = number
    try:
        yield
    finally:
        world.group_count = before


def split_off(parent: Any, inner: Any, members: Sequence[int], timeout: Any) -> NewGroup:
    """Return with what the group `parent` has made `inner`, of some of its members."""
    world: Any = distributed_c10d._world
    called = inner.group_desc
    return NewGroup(
        inner.get_group_store(),
        inner.group_name,
        inner.rank(),
        inner.size(),
        members,
        world.pg_backend_config[parent],
        timeout or distributed_c10d.default_pg_timeout,
        None if ":split:" in called else called,  # torch's own words
    )


def take_place(group: Any, inner: Any, parent: Any = None) -> None:
    """Put `group` where torch has just put `inner`: in its maps, and by its name.

    Where `inner` was split off the group `parent`, torch has put it nowhere yet. Raises
    AttributeError or RuntimeError when this torch has no such maps; then nothing of `inner` has
    changed.
    """
    world: Any = distributed_c10d._world
    # Whatever another torch may lack is asked for before the first change: an error then leaves
    # `inner` where it is, and the group works unobserved.
    maps = [getattr(world, name) for name in _BY_GROUP]
    tagged = world.tags_to_pg
    # The backends of `inner`, which torch has written by device, and its name.
    backends = world.pg_backend_config[inner if parent is None else parent]
    kinds = dist.ProcessGroup.BackendType.__members__
    for entry in backends.split(","):
        name_of_device, _, name = entry.partition(":")
        device, kind = torch.device(name_of_device), kinds.get(name.upper(), kinds["CUSTOM"])
        if device in inner._device_types:
            group._register_backend(device, kind, inner._get_backend(device))
            group._set_default_backend(kind)
    if getattr(inner, "bound_device_id", None) is not None:  # `device_id=` of init_process_group
        group.bound_device_id = inner.bound_device_id
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
    if parent is None and register is not None and unregister is not None:
        unregister(inner.group_name)
        register(inner.group_name, group)


def send_together(is_ours: Callable[[Any], bool]) -> None:
    """Have `batch_isend_irecv` send as one also in a group that `is_ours`, where its backend can.

    Torch does so in groups of its own type only. NCCL would otherwise take the sends and
    receives one by one, and two ranks that each send first would wait for each other. Not where
    this torch has other functions.
    """
    batch: Any = getattr(distributed_c10d, "batch_isend_irecv", None)
    together: Any = getattr(distributed_c10d, "_coalescing_manager", None)
    if batch is None or together is None or hasattr(batch, _WATCHED):
        return

    @functools.wraps(batch)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> Any:
        first = p2p_op_list[0] if p2p_op_list and isinstance(p2p_op_list, list) else None
        if not isinstance(first, dist.P2POp):  # torch says what is wrong
            return batch(p2p_op_list)
        group: Any = first.group or dist.group.WORLD
        device = first.tensor.device
        if not is_ours(group) or not group._get_backend(device).supports_coalescing:
            return batch(p2p_op_list)
        well_formed = all(isinstance(each, dist.P2POp) for each in p2p_op_list)
        if not well_formed or len({operation.group for operation in p2p_op_list}) != 1:
            return batch(p2p_op_list)
        # The manager calls `_start_coalescing` and `_end_coalescing` of the group, which an
        # observed group passes on. Each operation in between still comes through its own method and
        # is recorded.
        with together(group, device, async_ops=True) as sent:
            for operation in p2p_op_list:
                peer = {
                    "group_dst" if operation.op is dist.isend else "group_src": operation.group_peer
                }
                operation.op(operation.tensor, group=operation.group, tag=operation.tag, **peer)
        return sent.works

    setattr(batch_isend_irecv, _WATCHED, True)
    for module in (distributed_c10d, dist):
        setattr(module, batch.__name__, batch_isend_irecv)


def group_backend(group: Any) -> str:
    """The name of a group's backend: gloo, nccl; empty where torch does not tell."""
    name = getattr(group, "name", None)
    return str(name()) if callable(name) else ""


def source_of(work: Any) -> int | None:
    """The sender of the message that a recv from any rank got, as a group rank; None if unknown."""
    source = getattr(work, "_source_rank", None)
    rank = source() if callable(source) else -1
    return int(rank) if rank >= 0 else None


def unwaited_results() -> int:
    """Results of functional collectives not given to wait_tensor yet; 0 where unknown.

    Of this thread: torch counts for each.
    """
    size = getattr(torch._C._distributed_c10d, "_get_work_registry_size", None)
    return int(size()) if callable(size) else 0


def is_forgotten(group: Any) -> bool:
    """True when torch does not know `group` any more: it was destroyed."""
    known = getattr(getattr(distributed_c10d, "_world", None), "pg_map", None)
    return known is not None and group not in known


def known_groups() -> tuple[Any, ...]:
    """Return the groups that torch knows; empty also where they are not known."""
    return tuple(getattr(getattr(distributed_c10d, "_world", None), "pg_map", ()))


compilers_callback: Callable[[], Any] = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None),
    "get_eval_frame_callback",
    lambda: None,
)
"""None unless `torch.compile` looks at each function that is called, to compile it."""


def keep_from_compiler(function: Any, inner_too: bool = True) -> bool:
    """Have `torch.compile` run `function`, and what it calls, as it is; False if it cannot.

    The compiler would read code of ours that torch calls, and refuse it. Its public switch
    imports the compiler, which takes seconds. Without `inner_too` it compiles what is called.
    """
    known: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    action = getattr(known, "_FrameAction", None)
    if action is None or not hasattr(known, "set_code_exec_strategy"):
        return False
    inner = action.SKIP if inner_too else action.DEFAULT
    strategy = known._FrameExecStrategy(action.SKIP, inner)
    known.set_code_exec_strategy(function.__code__, strategy)
    return True


def compiled() -> Iterator[tuple[str, Any, bool]]:
    """Return what `torch.compile` was given, and with `fullgraph`; nothing if unknown.

    By name: a function, a method, or a model with all of its parts.
    """
    for each in objects_of(FunctionType, torch.nn.Module):
        if type(each) is not FunctionType:
            context, given = vars(each).get("dynamo_ctx"), each._modules.get("_orig_mod")
        elif "_dynamo" in each.__code__.co_filename:
            given = each.__dict__.get("_torchdynamo_orig_callable")
            names = zip(each.__code__.co_freevars, each.__closure__ or (), strict=False)
            context = next((cell.cell_contents for name, cell in names if name == "self"), None)
        else:
            continue
        if given is not None:
            of, whole = getattr(given, "__self__", given), getattr(context, "fullgraph", False)
            yield getattr(of, "__qualname__", type(of).__name__), given, whole


_NOT_COMPILED = "runs as Python"
"""A constant in code that is to run as it is: the compiler skips forever what equals its own."""


def on_compiled(chosen: Callable[[CodeType, Sequence[CodeType]], bool], *, load: bool) -> bool:
    """Have `chosen` hear of what `torch.compile` compiles: code, and all that is compiled in it.

    Where it says so that code runs as Python, until `compile_again`. False while the compiler is
    not loaded, unless `load`, and where this torch does not tell.
    """
    if load:
        importlib.import_module("torch._dynamo.convert_frame")
    module = sys.modules.get("torch._dynamo.convert_frame")
    register = getattr(module, "register_bytecode_hook", None)
    if register is None:
        return False

    def hook(code: CodeType, _: CodeType) -> CodeType | None:
        values = sys._getframe(1).f_locals  # their names differ between releases
        output = values.get("output") or getattr(values.get("tracer_output"), "output_graph", None)
        traced = getattr(getattr(output, "tracing_context", None), "traced_code", ())
        with contextlib.suppress(Exception):  # what is compiled matters more
            if chosen(code, tuple(traced) or (code,)):
                return code.replace(co_consts=(*code.co_consts, _NOT_COMPILED))
        return None

    register(hook)
    return True


def compile_again(code: CodeType) -> None:
    """Have `torch.compile` forget what it made of `code`. While no thread is in it."""
    reset = getattr(torch._C._dynamo.eval_frame, "reset_code", None)
    if reset is not None:
        reset(code)


CALL_OF_MODULE = "_call_impl"
"""The function of `torch.nn.modules.module` in whose frame a module's forward runs."""


def is_compiled(module: torch.nn.Module) -> bool:
    """True if a module was compiled, by torch.compile() or its own compile()."""
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    return compiled or type(module).__name__ == "OptimizedModule"


class Loading(NamedTuple):
    """A DataLoader's iterator from which a batch is awaited."""

    batch: tuple[int, int]
    """Another value for each batch."""
    owing: tuple[int, ...]
    """The pids of the workers that have a batch to make."""
    due: int
    """The pid of the one whose batch comes next; 0 where that is not known."""
    everyone: tuple[int, ...]
    """The pids of all its workers."""


_AWAITS_BATCH = "_get_data"


def loading(frames: Iterable[FrameType], *, awaited: bool = False) -> Loading | None:
    """The iterator with worker processes that these frames are in; None for none.

    With `awaited` only where it waits for a batch, not where it ends, say. Its state is read
    while its own thread may change it: whatever makes no sense then becomes None too.
    """
    for frame in frames:
        if awaited and frame.f_code.co_name != _AWAITS_BATCH:
            continue
        is_loaders = frame.f_globals.get("__name__") == "torch.utils.data.dataloader"
        iterator: Any = frame.f_locals.get("self") if is_loaders else None
        if not hasattr(iterator, "_workers"):
            continue
        with contextlib.suppress(AttributeError, KeyError, RuntimeError, TypeError):
            pids = [int(process.pid or 0) for process in iterator._workers]
            number, tasks = int(iterator._rcvd_idx), dict(iterator._task_info)
            # A task has the number of its worker, and its data once they are there.
            owing = {pids[task[0]] for task in tasks.values() if len(task) == 1}
            due = tasks.get(number, ())
            return Loading(
                (id(iterator), number),
                tuple(sorted(owing)),
                pids[due[0]] if len(due) == 1 else 0,
                tuple(pids),
            )
    return None


PINS = "torch.utils.data._utils.pin_memory"
"""The module whose functions copy a batch into pinned memory."""


def pinning_thread(frame: FrameType) -> threading.Thread | None:
    """Return the thread that copies batches into pinned memory; None where none is awaited there.

    `frame` is that of a function in which a DataLoader's iterator may wait for the next batch.
    """
    where = frame.f_globals.get("__name__"), frame.f_code.co_name
    awaits = where == ("torch.utils.data.dataloader", "_try_get_data")
    iterator = frame.f_locals.get("self") if awaits else None
    thread = getattr(iterator, "_pin_memory_thread", None)
    return thread if isinstance(thread, threading.Thread) else None


def loader_iterator() -> Any:
    """The base class of what iterates a DataLoader; None where this torch lacks it."""
    found = getattr(torch.utils.data.dataloader, "_BaseDataLoaderIter", None)
    return found if callable(getattr(found, "__next__", None)) else None


@contextlib.contextmanager
def impatient_loaders() -> Iterator[None]:
    """Within, a DataLoader's iterator that goes away does not wait seconds for each worker.

    It ends them itself, as it does after 5 s: where this torch is another, only then.
    """
    utils: Any = torch.utils.data._utils
    patience_s = getattr(utils, "MP_STATUS_CHECK_INTERVAL", None)
    if patience_s is None:
        yield
        return
    utils.MP_STATUS_CHECK_INTERVAL = 0.1
    try:
        yield
    finally:
        utils.MP_STATUS_CHECK_INTERVAL = patience_s


def function_returned(frames: Iterable[FrameType]) -> bool:
    """True if these frames of a rank end in the launcher that has called a function as that rank.

    By torch's launcher (`elastic_launch`, accelerate's `notebook_launcher`) such a rank waits until
    the others have returned as well. If torch's code has changed: False.
    """
    module = "torch.distributed.elastic.multiprocessing.api"
    return any(
        frame.f_code.co_name == "_wrap"
        and frame.f_globals.get("__name__") == module
        and "ret" in frame.f_locals
        for frame in frames
    )


def uses_cuda() -> bool:
    """True when this process has begun to use CUDA: to ask more would begin it."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def when_cuda_begins(function: Callable[[], None]) -> None:
    """Call `function` once CUDA begins in this process, or now; never where torch cannot tell."""
    # torch's own list of calls that wait for CUDA. Every public way to the driver would begin CUDA,
    # and a process that has begun it can fork none that use it.
    later = getattr(torch.cuda, "_lazy_call", None)
    if later is not None:
        later(function)


def is_capturing() -> bool:
    """Return whether a CUDA graph is captured on this thread's stream; False without CUDA."""
    capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
    return capturing is not None and uses_cuda() and bool(capturing())


def abort_nccl() -> None:
    """End every NCCL communicator of this process, with what hangs in it.

    From any thread, and meant for another one than the one that hangs: a wait for the GPU then
    returns, without an error and with a wrong value. `destroy_process_group` would wait for the
    GPU itself. The groups are of no use afterwards.
    """
    kind = getattr(dist, "ProcessGroupNCCL", ())  # no class in a torch without NCCL
    by_id: dict[int, Any] = {}  # groups may share a backend
    for group in known_groups():
        for device in getattr(group, "_device_types", ()):
            with contextlib.suppress(RuntimeError):  # no backend for this device
                backend = group._get_backend(device)
                backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
                if isinstance(backend, kind) and hasattr(backend, "abort"):
                    by_id[id(backend)] = backend
    backends = list(by_id.values())
    # Together, as torch does: one alone may wait for another that hangs.
    together = len(backends) > 1 and all(hasattr(each, "_group_start") for each in backends)
    if together:
        backends[0]._group_start()
    for backend in backends:
        with contextlib.suppress(RuntimeError):  # it was aborted before
            backend.abort()
    if together:
        backends[0]._group_end()


def in_backward() -> bool:
    """True on a thread that runs a backward; False also where torch does not tell."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1


def without_hooks_while_scripting(is_ours: Callable[[Any], bool]) -> None:
    """Have `torch.jit.script` not see forward pre-hooks that `is_ours`: it would compile them.

    Not where this torch's `script` is another: it finds names by counting frames.
    """
    original = torch.jit.script
    if "_frames_up" not in inspect.signature(original).parameters:
        return

    @functools.wraps(original)
    def script(obj: Any, *args: Any, **named: Any) -> Any:
        # torch looks names up in the frame that is so many callers out, and this function is one
        # more.
        if len(args) > 1:
            args = (args[0], args[1] + 1, *args[2:])
        else:
            named["_frames_up"] = named.get("_frames_up", 0) + 1
        parts = obj.modules() if isinstance(obj, torch.nn.Module) else ()
        all_hooks = [part._forward_pre_hooks for part in parts]
        taken = [(of, n, hook) for of in all_hooks for n, hook in of.items() if is_ours(hook)]
        for hooks, number, _ in taken:
            del hooks[number]
        try:
            return original(obj, *args, **named)
        finally:
            for hooks, number, hook in taken:
                hooks[number] = hook

    torch.jit.script = script


def forget_groups() -> None:
    """Forget every process group, also half-made ones after a failed init.

    `destroy_process_group` does nothing when init failed half way; torch then counts group
    names on, and this rank waits for keys that its peers never write. Falls back to
    `destroy_process_group` alone.
    """
    if dist.is_initialized():
        # First: to destroy a group of NCCL's waits for the GPU, which may hang in it.
        abort_nccl()
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):
            dist.destroy_process_group()
    world: Any = getattr(distributed_c10d, "_world", None)
    if world is None:
        return
    for name in (*_BY_GROUP, "tags_to_pg", "pg_coalesce_state"):
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


def set_group_timeout(timeout: timedelta, group: Any) -> bool:
    """Change a group's timeout for operations issued from now on; False if it cannot be."""
    # torch's `_set_pg_timeout` would do, but for a backend that is neither gloo nor NCCL it warns,
    # and its caller does not learn that the old limit still holds.
    setters = []
    for device in getattr(group, "_device_types", ()):
        with contextlib.suppress(RuntimeError):  # no backend for this device
            backend = group._get_backend(device)
            setters.append(getattr(backend, "_set_default_timeout", None))
    for set_timeout in filter(None, setters):
        set_timeout(timeout)
    return bool(setters) and all(setters)


_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
_REDUCING = {
    "default_hooks": ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"),
    "powerSGD_hook": ("powerSGD_hook", "batched_powerSGD_hook"),
    "quantization_hooks": ("quantization_pertensor_hook", "quantization_perchannel_hook"),
}
"""torch's hooks that give each rank of their group the same gradients."""


def hook_names(wrapped: Any) -> list[str]:
    """The communication hooks that a DDP object was given."""
    return [_name(hook) for hook, _ in getattr(wrapped, "_comm_hooks", ())]


def hooks_that_may_part(wrapped: Any) -> list[str]:
    """Return those for which it is not certain that all ranks get the same gradients."""
    parting = []
    for hook, state in getattr(wrapped, "_comm_hooks", ()):
        folder, _, module = str(getattr(hook, "__module__", "")).rpartition(".")
        is_torchs = folder == _HOOKS and _name(hook) in _REDUCING.get(module, ())
        # It reduces among the ranks of its own group, which should be all of the DDP object's.
        group = getattr(state, "process_group", state)
        if isinstance(group, dist.ProcessGroup):
            is_whole = group.size() == wrapped.process_group.size()
        else:
            is_whole = group is None
        if not (is_torchs and is_whole):
            parting.append(_name(hook))
    return parting


def _name(hook: Any) -> str:
    return str(getattr(hook, "__name__", type(hook).__name__))


# -- the protocol of TCPStore --------------------------------------------------------------

_VALIDATE, _PING = 0, 13
"""Numbers of a client's queries. A client sends the first with this magic number, and then asks
for a number of its own back."""
_MAGIC, _NONCE = 0x3C85F7CE, 0x64647021


def is_store(connection: socket.socket) -> bool | None:
    """Return True when a TCPStore of torch's answers at the other end, as its clients ask for it.

    False if something else does, or if it hangs up; None if nothing comes within the time limit
    of `connection`: a store may be too busy.
    """
    try:
        connection.sendall(struct.pack("=BIBI", _VALIDATE, _MAGIC, _PING, _NONCE))
        answer = connection.recv(4, socket.MSG_WAITALL)
    except TimeoutError:
        return None
    except OSError:
        return False
    return answer == struct.pack("=I", _NONCE)
