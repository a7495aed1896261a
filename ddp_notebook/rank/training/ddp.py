"""The one place for DDP's private API: its construction by stages, and what it knows later.

The functions are called on ranks by name and give plain dicts. A stage that a rank cannot pass
gives ``{"failed": kind, "text": why}``: `kind` is memory, error or interrupted. What this
torch does not have is left out and named under ``"lacks"``; `missing` lists it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import math
import re
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from IPython.core.getipython import get_ipython
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.model import codec
from ddp_notebook.model.ddp import (
    Bucket,
    BucketPlan,
    Fingerprint,
    Reduction,
    Synced,
    TensorInfo,
    WrapStage,
)
from ddp_notebook.rank.training.ddp_stage import is_out_of_memory, stage_of

VERIFY = "torch.distributed.utils:_verify_param_shape_across_processes"
SYNC = "torch.distributed.utils:_sync_module_states"
ASSIGN = "torch.distributed:_compute_bucket_assignment_by_size"
FIRST_BYTES = "torch.distributed:_DEFAULT_FIRST_BUCKET_BYTES"
LOGGER = "torch.distributed:Logger"
LOGGING_DATA = "torch.nn.parallel:DistributedDataParallel._get_ddp_logging_data"
IN_USE = (
    "torch.nn.parallel:DistributedDataParallel._check_reducer_finalized",
    "torch.nn.parallel:DistributedDataParallel._update_process_group",
    "torch.distributed:Reducer._reset_state",
)
SKIP_SYNC = "torch.nn.parallel:DistributedDataParallel(init_sync=)"

_NO_GRADIENT = re.compile(r"indices which did not receive grad[^:]*: ([\d ]+)")
_MIB = 2**20
_BROADCAST_BYTES = 250 * _MIB
"""How much DDP's constructor broadcasts at a time."""
_DEFAULT_CAP_MB = 25

_Named = list[tuple[str, torch.Tensor]]
_Reduced = tuple[list[str], list[torch.nn.Parameter], list[bool]]

_made: dict[str, DistributedDataParallel] = {}
"""Constructed and not yet given to the user: all ranks get theirs, or none."""


def missing() -> list[str]:
    """What of DDP's private API this torch lacks."""
    paths = (VERIFY, SYNC, ASSIGN, FIRST_BYTES, LOGGER, LOGGING_DATA)
    lacks = [path for path in paths if _find(path) is None]
    return lacks + ([] if _can_skip_sync() else [SKIP_SYNC])


def _find(path: str) -> Any:
    """The object written ``module:name``, None when this torch has no such thing."""
    module, _, names = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name, None)
    return found


def _can_skip_sync() -> bool:
    return "init_sync" in inspect.signature(DistributedDataParallel.__init__).parameters


# -- what the model is -------------------------------------------------------------------


def look(name: str) -> dict[str, Any]:
    """What the variable `name` is: ``{"kind": absent, other, module or ddp, "type": ...}``.

    `problem` says why a module cannot be wrapped, empty when it can.
    """
    kind = "other" if name in get_ipython().user_ns else "absent"
    value = get_ipython().user_ns.get(name)
    if isinstance(value, torch.nn.Module):
        kind = "ddp" if isinstance(value, DistributedDataParallel) else "module"
    problem = _problem(value) if isinstance(value, torch.nn.Module) else ""
    return {"kind": kind, "type": type(value).__name__, "problem": problem}


def _problem(module: torch.nn.Module) -> str:
    parameters, buffers = _states(module)
    for name, tensor in (*parameters, *buffers):
        if torch.nn.parameter.is_lazy(tensor):
            return f"{name} has no shape yet: run a forward first, as lazy modules need it"
    if not any(parameter.requires_grad for _, parameter in parameters):
        return "no parameter requires a gradient, so there is nothing to reduce"
    return ""


def _module(name: str) -> Any:
    return get_ipython().user_ns[name]


def _ignored(module: torch.nn.Module) -> set[str]:
    """Names that the user had DDP leave alone, in DDP's own attribute for them."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def _states(module: torch.nn.Module) -> tuple[_Named, _Named]:
    """The parameters and the buffers that DDP cares for, with their names."""
    ignored = _ignored(module)
    return (
        [(name, each) for name, each in module.named_parameters() if name not in ignored],
        [(name, each) for name, each in module.named_buffers() if name not in ignored],
    )


def reduced(module: torch.nn.Module) -> _Reduced:
    """The parameters that DDP's reducer gets, in its order: name, parameter, sparse gradient.

    Found as `_build_params_for_reducer` finds them, a method of the object to be made.
    """
    ignored = _ignored(module)
    found: dict[torch.nn.Parameter, tuple[str, bool]] = {}
    for prefix, part in module.named_modules():
        sparse = isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse
        for name, parameter in part.named_parameters(recurse=False):
            full = f"{prefix}.{name}"
            if parameter.requires_grad and full not in ignored and parameter not in found:
                found[parameter] = full.removeprefix("."), sparse
    names = [name for name, _ in found.values()]
    return names, list(found), [sparse for _, sparse in found.values()]


# -- the stages ------------------------------------------------------------------------


@stage_of(WrapStage.PARAMETERS_VERIFIED)
def fingerprint(name: str, hashed: bool) -> dict[str, Any]:
    """What the module `name` is made of, and with `hashed` what is in it."""
    module = _module(name)
    parameters, buffers = _states(module)
    hashes = [_hash(each.detach()) for _, each in (*parameters, *buffers)] if hashed else []
    return {"hashes": hashes, **codec.encode(contents(module))}


def contents(module: torch.nn.Module) -> Fingerprint:
    """What `module` is made of."""
    parameters, buffers = _states(module)
    return Fingerprint(
        tuple(_tensor(*each) for each in parameters), tuple(_tensor(*each) for each in buffers)
    )


def _tensor(name: str, tensor: torch.Tensor) -> TensorInfo:
    # torch compares strides of what its reducer gets; values of others are sent flat.
    strided = tensor.requires_grad and tensor.layout is torch.strided
    return TensorInfo(
        name=name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        requires_grad=tensor.requires_grad,
        stride=tuple(tensor.stride()) if strided else (),
        device=tensor.device.type,
    )


@stage_of(WrapStage.PARAMETERS_VERIFIED)
def verify(name: str) -> dict[str, Any]:
    """torch's own check of the parameters' shapes: a collective, and it does not name a rank."""
    check = _find(VERIFY)
    if check is None:
        return {"lacks": [VERIFY]}
    check(dist.group.WORLD, reduced(_module(name))[1])
    return {"lacks": []}


@stage_of(WrapStage.BROADCAST)
def broadcast(name: str) -> dict[str, Any]:
    """Take rank 0's values; hashes of all tensors before and after, and their size in bytes."""
    module = _module(name)
    parameters, buffers = _states(module)
    tensors = [tensor.detach() for _, tensor in (*parameters, *buffers)]
    before = tuple(_hash(tensor) for tensor in tensors)
    lacks = _sync(module, tensors)
    after = tuple(_hash(tensor) for tensor in tensors)
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return {**codec.encode(Synced(before, after, size_bytes)), "lacks": lacks}


def _sync(module: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> list[str]:
    sync = _find(SYNC)
    if sync is None:
        for tensor in tensors:
            dist.broadcast(tensor, 0)
        return [SYNC]
    sync(
        module=module,
        process_group=dist.group.WORLD,
        broadcast_bucket_size=_BROADCAST_BYTES,
        src=0,
        params_and_buffers_to_ignore=_ignored(module),
    )
    return []


def _hash(tensor: torch.Tensor) -> str:
    """A hash of the values; empty where they cannot be read (sparse, quantised, a subclass)."""
    try:
        flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.blake2b(flat.numpy().data, digest_size=8).hexdigest()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        if is_out_of_memory(error):
            raise
        return ""


@stage_of(WrapStage.BUCKETS)
def buckets(name: str, cap_mb: float | None, find_unused: bool) -> dict[str, Any]:
    """The buckets DDP would make with these options: a `BucketPlan` as JSON."""
    found, limits = reduced(_module(name)), bucket_limits(cap_mb)
    if _find(ASSIGN) is None:
        return {**codec.encode(BucketPlan(None, None, limits)), "lacks": [ASSIGN]}
    # Nothing is known of the order of gradients at first, so without --find-unused-parameters
    # DDP puts everything into one bucket, and makes others when the second step begins.
    at_first = limits if find_unused else (sys.maxsize,)
    first = assign(found, at_first)[::-1]
    later = None if find_unused else assign(found, limits, range(len(found[0]))[::-1])
    return {**codec.encode(BucketPlan(first, later, limits)), "lacks": []}


def bucket_limits(cap_mb: float | None) -> tuple[int, ...]:
    """DDP's limits in bytes: of the first bucket, and of each later one.

    The first is small only when no `cap_mb` is given: `DistributedDataParallel(m)` is not
    `DistributedDataParallel(m, bucket_cap_mb=25)`.
    """
    cap = int((_DEFAULT_CAP_MB if cap_mb is None else cap_mb) * _MIB)
    return ((_find(FIRST_BYTES) or _MIB) if cap_mb is None else cap, cap)


def assign(found: _Reduced, limits: Sequence[int], order: Sequence[int] = ()) -> tuple[Bucket, ...]:
    """Buckets as torch makes them of what `reduced` found, in `order` (default: as it is)."""
    _, parameters, sparse = found
    tensors = [parameters[i] for i in order] if order else parameters
    told = [list(order)] if order else []
    made, _ = _find(ASSIGN)(tensors, list(limits), sparse, *told)
    return tuple(_bucket(found, members) for members in made)


def _bucket(found: _Reduced, members: Sequence[int]) -> Bucket:
    names, parameters, _ = found
    size = sum(parameters[i].numel() * parameters[i].element_size() for i in members)
    return Bucket(tuple(names[i] for i in members), size)


@stage_of(WrapStage.REDUCER)
def construct(name: str, cap_mb: float | None, find_unused: bool) -> dict[str, Any]:
    """Make the DistributedDataParallel object; `settle` gives it to the user.

    `hooks` is on how many parameters its reducer waits, `sizes` those of its buckets in
    bytes, empty when this torch does not tell. `synced_again` is True where DDP cannot be
    kept from comparing and broadcasting once more.
    """
    options: dict[str, Any] = {"find_unused_parameters": find_unused}
    if cap_mb is not None:
        options["bucket_cap_mb"] = int(cap_mb) if math.floor(cap_mb) == cap_mb else cap_mb
    if _can_skip_sync():
        options["init_sync"] = False
    made = _made[name] = DistributedDataParallel(_module(name), **options)
    told = _log(made)
    return {
        "hooks": int(told.get("num_parameter_tensors", len(reduced(made.module)[0]))),
        "sizes": _numbers(told.get("bucket_sizes", ""), sys.maxsize),
        "synced_again": "init_sync" not in options,
    }


def settle(name: str, target: str) -> dict[str, Any]:
    """Put the object made from `name` into the variable `target`; empty: forget it, and hooks."""
    made = _made.pop(name, None)
    if target and made is not None:
        get_ipython().user_ns[target] = made
    return {"settled": made is not None}


# -- afterwards ------------------------------------------------------------------------


def reduction(name: str) -> dict[str, Any]:
    """What the DDP object `name` knows of its steps: a `Reduction` as JSON."""
    wire: dict[str, Any] = codec.encode(reduction_of(name))
    return wire


def reduction_of(name: str) -> Reduction:
    """What the DDP object `name` knows of its steps."""
    wrapped = _module(name)
    told = _log(wrapped)
    found = reduced(wrapped.module)
    names = found[0]
    order = _numbers(told.get("prev_iteration_grad_ready_order_indices", ""), len(names))
    keeps = bool(wrapped.find_unused_parameters) and not wrapped.static_graph
    made = _rebuilt(told, found)
    rebuilt, can_assign = made is not None, _find(ASSIGN) is not None
    if made is None and can_assign and keeps:
        made = assign(found, _limits_of(wrapped))[::-1]
    elif made is None and can_assign and len(order) == len(names):
        made = assign(found, _limits_of(wrapped), order)
    return Reduction(
        steps=int(told.get("iteration", 0)),
        order=tuple(names[i] for i in order),
        buckets=made,
        rebuilt=rebuilt,
        keeps=keeps,
        idle=tuple(name for i, name in enumerate(names) if order and i not in order),
    )


def _rebuilt(told: dict[str, Any], found: _Reduced) -> tuple[Bucket, ...] | None:
    """The rebuilt buckets that DDP's log tells (``7 6 5, 4 3``); None before they are."""
    text = str(told.get("rebuilt_per_bucket_param_indices", ""))
    parts = [part.replace(" ", ",") for part in text.split(",") if part.strip()]
    members = [_numbers(part, len(found[0])) for part in parts]
    return tuple(_bucket(found, each) for each in members) if members and all(members) else None


def _limits_of(wrapped: Any) -> list[int]:
    cap = int(getattr(wrapped, "bucket_bytes_cap", _DEFAULT_CAP_MB * _MIB))
    small = getattr(wrapped, "bucket_bytes_cap_default", True)
    return [(_find(FIRST_BYTES) or _MIB) if small else cap, cap]


def _log(wrapped: Any) -> dict[str, Any]:
    """DDP's own log of `wrapped`, with what a second logger reads from its reducer now.

    DDP writes down a step when the next one begins. A logger of ours looks at the same
    reducer and leaves DDP's own figures as they are.
    """
    told: dict[str, Any] = {}
    with contextlib.suppress(RuntimeError, AttributeError):
        told.update(wrapped._get_ddp_logging_data())
    with contextlib.suppress(RuntimeError, AttributeError, TypeError):
        fresh = _find(LOGGER)(wrapped.reducer)
        fresh.set_runtime_stats_and_log()
        data = fresh._get_ddp_logging_data()
        told.update({**data.strs_map, **data.ints_map})
    return told


def _numbers(text: Any, below: int) -> list[int]:
    """The numbers of ``7, 6, 5``; none when it is something else or one is not `below`."""
    parts = [part.strip() for part in str(text).split(",") if part.strip()]
    numbers = [int(part) for part in parts if part.isdecimal()]
    return numbers if len(numbers) == len(parts) and max(numbers, default=0) < below else []


# -- a DDP object in use ---------------------------------------------------------------


def unready(wrapped: Any) -> list[int]:
    """Places, in the reducer's order, of the parameters whose gradients it still waits for.

    None when no backward is open. A quarter of a microsecond, when nothing is wrong.
    """
    try:
        wrapped._check_reducer_finalized()
    except RuntimeError as error:
        match = _NO_GRADIENT.search(str(error))
        return _numbers(match[1].replace(" ", ","), sys.maxsize) if match else []
    return []


def reattach(wrapped: Any, group: Any) -> bool:
    """Have a DDP object go on with `group`, whatever its last backward was stopped in.

    False when this torch cannot, or when its group is one of some ranks only.
    """
    same_size = getattr(wrapped.process_group, "size", lambda: 0)() == group.size()
    if missing_in_use() or not same_size:
        return False
    before = wrapped.process_group  # not for the reducer to let go of last: see `Observer`
    wrapped._update_process_group(group)
    wrapped.reducer._reset_state()
    del before
    return True


def missing_in_use() -> list[str]:
    """What `unready` and `reattach` need and this torch lacks."""
    return [path for path in IN_USE if _find(path) is None]
