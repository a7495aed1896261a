"""The one place for DDP's private API: what a model is made of, its buckets, its reducer.

Looked up where it is called: a torch that lacks some of it has %ddp_wrap say so in that stage.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook import model

_dist: Any = dist
_NO_GRADIENT = re.compile(r"indices which did not receive grad[^:]*: ([\d ]+)")
_MIB = 2**20
_OUT_OF_MEMORY = ("allocate memory", "out of memory", "bad_alloc")

_Named = Sequence[tuple[str, torch.Tensor]]
Reduced = tuple[list[str], list[torch.nn.Parameter], list[bool]]


# -- what the model is -------------------------------------------------------------------


def problem_of(module: torch.nn.Module) -> str:
    """Why a module cannot be wrapped, empty when it can."""
    parameters, buffers = states_of(module)
    for name, tensor in (*parameters, *buffers):
        if torch.nn.parameter.is_lazy(tensor):
            return f"{name} has no shape yet: run a forward first, as lazy modules need it"
    if not any(parameter.requires_grad for _, parameter in parameters):
        return "no parameter requires a gradient, so there is nothing to reduce"
    return ""


def ignored(module: torch.nn.Module) -> set[str]:
    """Names that the user excluded from DDP, by DDP's own attribute."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def states_of(module: torch.nn.Module) -> tuple[_Named, _Named]:
    """The parameters and the buffers that DDP handles, with their names."""
    left_out = ignored(module)
    parameters = [named for named in module.named_parameters() if named[0] not in left_out]
    return parameters, [named for named in module.named_buffers() if named[0] not in left_out]


def reduced(module: torch.nn.Module) -> Reduced:
    """The parameters that DDP's reducer gets, in its order: name, parameter, sparse gradient.

    Found as `_build_params_for_reducer` finds them, a method of the object to be made.
    """
    # In the order of `named_modules` and not of `named_parameters`: a shared parameter counts where
    # it is met first, and an index that torch names in an error is one of this list.
    left_out = ignored(module)
    found: dict[torch.nn.Parameter, tuple[str, bool]] = {}
    for prefix, part in module.named_modules():
        sparse = isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse
        for name, parameter in part.named_parameters(recurse=False):
            full = f"{prefix}.{name}"
            if parameter.requires_grad and full not in left_out and parameter not in found:
                found[parameter] = full.removeprefix("."), sparse
    names = [name for name, _ in found.values()]
    return names, list(found), [sparse for _, sparse in found.values()]


def contents(module: torch.nn.Module) -> model.Fingerprint:
    """Describe the parameters and buffers of `module`."""
    parameters, buffers = states_of(module)
    return model.Fingerprint(
        tuple(_info(*named) for named in parameters), tuple(_info(*named) for named in buffers)
    )


def _info(name: str, tensor: torch.Tensor) -> model.TensorInfo:
    # torch compares strides of what its reducer gets; values of others are sent flat.
    strided = tensor.requires_grad and tensor.layout is torch.strided
    return model.TensorInfo(
        name,
        tuple(tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        tensor.requires_grad,
        tuple(tensor.stride()) if strided else (),
        tensor.device.type,
    )


def hash_of(tensor: torch.Tensor) -> str:
    """A hash of the values; empty if they cannot be read (sparse, quantised, a subclass)."""
    try:
        flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.blake2b(flat.numpy().data, digest_size=8).hexdigest()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        if is_out_of_memory(error):
            raise
        return ""


def is_out_of_memory(error: BaseException) -> bool:
    """True if memory was exhausted, by the messages of torch and its allocators."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in _OUT_OF_MEMORY)


# -- what DDP's constructor does, piece by piece -----------------------------------------


def verify_shapes(module: torch.nn.Module) -> None:
    """torch's own check of the parameters' shapes: a collective that does not name a rank."""
    _dist.utils._verify_param_shape_across_processes(dist.group.WORLD, reduced(module)[1])


def sync(module: torch.nn.Module) -> None:
    """Take rank 0's values, as DDP's constructor does, as many bytes at a time."""
    _dist.utils._sync_module_states(
        module=module,
        process_group=dist.group.WORLD,
        broadcast_bucket_size=250 * _MIB,
        src=0,
        params_and_buffers_to_ignore=ignored(module),
    )


def bucket_plan(
    module: torch.nn.Module, cap_mb: float | None, find_unused: bool
) -> model.BucketPlan:
    """The buckets DDP would make with these options."""
    parameters, limits = reduced(module), bucket_limits(cap_mb)
    # Nothing is known of the order of gradients at first, so without --find-unused-parameters
    # DDP puts everything into one bucket, and makes others when the second step begins.
    first = assign(parameters, limits if find_unused else [2**63 - 1])[::-1]
    later = None
    if not find_unused:
        later = tuple(assign(parameters, limits, range(len(parameters[0]))[::-1]))
    return model.BucketPlan(tuple(first), later, tuple(limits))


def bucket_limits(cap_mb: float | None) -> list[int]:
    """DDP's limits in bytes: of the first bucket, and of each later one.

    The first is small only when no `cap_mb` is given: `DistributedDataParallel(m)` is not
    `DistributedDataParallel(m, bucket_cap_mb=25)`.
    """
    cap = int((25 if cap_mb is None else cap_mb) * _MIB)
    return [_dist._DEFAULT_FIRST_BUCKET_BYTES if cap_mb is None else cap, cap]


def assign(
    parameters: Reduced, limits: Sequence[int], order: Sequence[int] = ()
) -> list[model.Bucket]:
    """The buckets that torch makes of the result of `reduced`, in `order` (default: unchanged)."""
    _, tensors, sparse = parameters
    ordered = [tensors[i] for i in order] if order else tensors
    indices = [list(order)] if order else []
    buckets, _ = _dist._compute_bucket_assignment_by_size(ordered, list(limits), sparse, *indices)
    return [_bucket(parameters, members) for members in buckets]


def _bucket(parameters: Reduced, members: Sequence[int]) -> model.Bucket:
    names, tensors, _ = parameters
    size = sum(tensors[i].numel() * tensors[i].element_size() for i in members)
    return model.Bucket(tuple(names[i] for i in members), size)


def make(
    module: torch.nn.Module, cap_mb: float | None, find_unused: bool
) -> DistributedDataParallel:
    """The DDP object, without what was done before: to compare and broadcast what is in it."""
    cap: Any = int(cap_mb) if cap_mb is not None and math.floor(cap_mb) == cap_mb else cap_mb
    return DistributedDataParallel(
        module, bucket_cap_mb=cap, find_unused_parameters=find_unused, init_sync=False
    )


def reducer_facts(wrapped: DistributedDataParallel) -> tuple[int, tuple[int, ...]]:
    """How many parameters its reducer waits for; the sizes of its buckets, in bytes."""
    log = _log_of(wrapped)
    hooks = int(log.get("num_parameter_tensors", len(reduced(wrapped.module)[0])))
    return hooks, tuple(_numbers(log.get("bucket_sizes", "")))


def bucket_bytes(values: Iterable[object]) -> list[int]:
    """The sizes in bytes of all buckets of the DDP models among `values`, smallest first."""
    sizes: set[int] = set()
    for value in values:
        if isinstance(value, DistributedDataParallel):
            seen = reduction(value).buckets
            sizes.update([each.size_bytes for each in seen] if seen else reducer_facts(value)[1])
    return sorted(sizes)


# -- afterwards ------------------------------------------------------------------------


def reduction(wrapped: Any) -> model.Reduction:
    """Read from a DDP object how it reduced its last steps."""
    log, parameters = _log_of(wrapped), reduced(wrapped.module)
    names = parameters[0]
    order = _numbers(log.get("prev_iteration_grad_ready_order_indices", ""), len(names))
    keeps = bool(wrapped.find_unused_parameters) and not wrapped.static_graph
    # The rebuilt buckets are ``7 6 5, 4 3`` in DDP's log; nothing before they are rebuilt.
    parts = str(log.get("rebuilt_per_bucket_param_indices", "")).split(",")
    places = [_numbers(part.replace(" ", ","), len(names)) for part in parts if part.strip()]
    rebuilt = bool(places) and all(places)
    small = getattr(wrapped, "bucket_bytes_cap_default", True)
    limits = bucket_limits(None if small else wrapped.bucket_bytes_cap / _MIB)
    buckets: list[model.Bucket] | None = None
    if rebuilt:
        buckets = [_bucket(parameters, members) for members in places]
    elif keeps:
        buckets = assign(parameters, limits)[::-1]
    elif len(order) == len(names):
        buckets = assign(parameters, limits, order)
    return model.Reduction(
        steps=int(log.get("iteration", 0)),
        order=tuple(names[i] for i in order),
        buckets=None if buckets is None else tuple(buckets),
        rebuilt=rebuilt,
        keeps=keeps,
        idle=tuple(name for i, name in enumerate(names) if order and i not in order),
    )


def _log_of(wrapped: Any) -> dict[str, Any]:
    """DDP's own log of `wrapped`, with what a second logger reads from its reducer now.

    DDP records a step when the next one begins. A second logger reads the same reducer without
    changing DDP's own figures.
    """
    log: dict[str, Any] = {}
    with contextlib.suppress(RuntimeError, AttributeError):
        log.update(wrapped._get_ddp_logging_data())
    with contextlib.suppress(RuntimeError, AttributeError, TypeError):
        fresh = _dist.Logger(wrapped.reducer)
        fresh.set_runtime_stats_and_log()
        data = fresh._get_ddp_logging_data()
        log.update({**data.strs_map, **data.ints_map})
    return log


def _numbers(text: Any, below: int = 2**63) -> list[int]:
    """The numbers of ``7, 6, 5``; none when it is something else or one is not `below`."""
    parts = [part.strip() for part in str(text).split(",") if part.strip()]
    numbers = [int(part) for part in parts if part.isdecimal()]
    return numbers if len(numbers) == len(parts) and max(numbers, default=0) < below else []


# -- a DDP object in use ---------------------------------------------------------------


def unready(wrapped: Any) -> list[int]:
    """Indices, in the reducer's order, of the parameters whose gradients it still waits for.

    None if no backward is open. It takes a quarter of a microsecond if nothing is wrong.
    """
    try:
        wrapped._check_reducer_finalized()
    except RuntimeError as error:
        # torch has the indices in the text of its error alone. Worded otherwise, it names none.
        match = _NO_GRADIENT.search(str(error))
        return _numbers(match[1].replace(" ", ",")) if match else []
    return []


def reattach(wrapped: Any, group: Any) -> bool:
    """Let a DDP object continue with `group`, wherever its last backward was interrupted.

    False if its group has only some of the ranks.
    """
    if wrapped.process_group.size() != group.size():
        return False
    before = wrapped.process_group  # not for the reducer to let go of last: see `Observer`
    wrapped._update_process_group(group)
    wrapped.reducer._reset_state()
    del before
    return True
