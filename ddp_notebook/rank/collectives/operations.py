"""The operations of a process group: torch's methods, their names, and what a call is about."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch


class Facts(NamedTuple):
    """The arguments of one call; `root` and `peer` are ranks of the group.

    `must_match` is what all ranks must have the same, beside the operation.
    """

    must_match: tuple[Any, ...] = ()
    shape: tuple[int, ...] = ()
    dtype: str = ""
    numel: int = 0
    bytes: int = 0
    tensors: int = 0
    reduce_op: str = ""
    root: int | None = None
    peer: int | None = None
    tag: int = 0
    waited: bool = False
    """The caller waits for its end."""


_Key = Callable[[Sequence[Any]], Hashable]
"""The key that a call shares with others whose facts are the same; None where that is unknown.

It is made before each collective, the facts only once for each key. It may fail for calls of
another form.
"""


@dataclass(frozen=True)
class Operation:
    """One method of torch's ProcessGroup. `name` is that of the function users call."""

    method: str
    name: str
    facts: Callable[[Sequence[Any]], Facts]
    """Reads the arguments, those given by name behind the others."""
    key: _Key = lambda args: None
    to_peer: bool = False
    has_metric: bool = False
    """The user's code may name what is reduced, a metric: the name is looked for."""
    exchanges: Literal["", "lists", "parts"] = ""
    """It sends each rank something else: tensors of a list, or parts of one tensor."""

    @property
    def is_barrier(self) -> bool:
        """True of an operation that waits for all that was issued before."""
        return self.name in ("barrier", "monitored_barrier")


@lru_cache(maxsize=64)
def dtype_name(dtype: Any) -> str:
    """float32, as users write it without torch."""
    return str(dtype).removeprefix("torch.")


def reduce_name(options: Any) -> str:
    """SUM, MAX and so on of an options object; empty without one."""
    kind = getattr(options, "reduceOp", None)
    number = getattr(kind, "op", kind)
    # RedOpType.SUM, or <RedOpType.SUM: 0>
    return str(number).rpartition(".")[2].rstrip(">").partition(":")[0] if kind is not None else ""


def _options(args: Sequence[Any]) -> Any:
    """Return the options object of a call, which comes last; None without one."""
    # Without: the call comes from C++, or from user code that got the work itself.
    return args[-1] if args and hasattr(args[-1], "asyncOp") else None


def _flat(value: Any) -> Sequence[torch.Tensor]:
    """The tensors of an argument: a tensor, a list of them, a list of such lists."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if not value:
        return ()
    flat: Sequence[torch.Tensor] = value if isinstance(value[0], torch.Tensor) else value[0]
    return flat


def _reduced(position: int, *, rooted: bool = False) -> _Key:
    """The key of a call with one tensor at `position`, in a list or by itself, and options last."""

    def key(args: Sequence[Any]) -> Hashable:
        tensor, options = args[position], args[-1]
        if type(tensor) is list:
            (tensor,) = tensor
        root = options.rootRank if rooted else None
        # By its hash: the object is made anew each time it is read.
        return (tensor.shape, tensor.dtype, hash(options.reduceOp), root, options.asyncOp)

    return key


def _moved(position: int, *, rooted: bool = False) -> _Key:
    """The key of a call that reduces nothing."""

    def key(args: Sequence[Any]) -> Hashable:
        tensor, options = args[position], args[-1]
        if type(tensor) is list:
            (tensor,) = tensor
        return (tensor.shape, tensor.dtype, options.rootRank if rooted else None, options.asyncOp)

    return key


def _key_of_peer(args: Sequence[Any]) -> Hashable:
    (tensor,), peer, tag = args
    return (tensor.shape, tensor.dtype, peer, tag)


def _same(position: int) -> Callable[[Sequence[Any]], Facts]:
    """Every rank must bring tensors of the same shape as argument `position`."""

    def read(args: Sequence[Any]) -> Facts:
        options, tensors = _options(args), _flat(args[position])
        facts = _sizes(tensors)
        root, reduce_op = getattr(options, "rootRank", None), reduce_name(options)
        # Dimensions of size 1 change nothing in what is sent.
        shapes = tuple(tuple(size for size in t.shape if size != 1) for t in tensors)
        return facts._replace(
            must_match=(shapes, facts.dtype, reduce_op, root),
            reduce_op=reduce_op,
            root=root,
            waited=options is not None and not options.asyncOp,
        )

    return read


def _sizes(tensors: Sequence[torch.Tensor]) -> Facts:
    if not tensors:
        return Facts()
    first = tensors[0]
    numel = sum(t.numel() for t in tensors)
    return Facts(
        shape=tuple(first.shape),
        dtype=dtype_name(first.dtype),
        numel=numel,
        bytes=numel * first.element_size(),
        tensors=len(tensors),
    )


def _gathered(args: Sequence[Any]) -> Facts:
    """all_gather: what a rank brings must be what the others make room for at its place."""
    facts = _same(1)(args)
    rooms: tuple[Any, ...] = tuple(tuple(t.shape) for t in _flat(args[0]))
    if len(set(rooms)) > 1:  # legal where the backend can: every rank has the same list
        return facts._replace(must_match=(rooms, *facts.must_match[1:]))
    return facts


def _all_to_all(args: Sequence[Any]) -> Facts:
    """Sizes may differ from rank to rank; only the dtype must be the same."""
    facts = _same(1)(args)
    return facts._replace(must_match=(facts.dtype,))


def _barrier(args: Sequence[Any]) -> Facts:
    options = _options(args)
    return Facts(waited=options is not None and not options.asyncOp)


def _to_peer(args: Sequence[Any]) -> Facts:
    return _sizes(_flat(args[0]))._replace(peer=int(args[1]), tag=int(args[2]))


def _from_anybody(args: Sequence[Any]) -> Facts:
    return _sizes(_flat(args[0]))._replace(tag=int(args[1]))


ALL_REDUCE, FROM_ANYBODY = "allreduce", "recv_anysource"
"""torch's method for a recv without a source."""
OPERATIONS = (
    Operation(ALL_REDUCE, "all_reduce", _same(0), _reduced(0), has_metric=True),
    Operation("allreduce_coalesced", "all_reduce_coalesced", _same(0)),
    Operation("broadcast", "broadcast", _same(0), _moved(0, rooted=True), has_metric=True),
    Operation("reduce", "reduce", _same(0), _reduced(0, rooted=True), has_metric=True),
    Operation("allgather", "all_gather", _gathered, has_metric=True),
    Operation("allgather_coalesced", "all_gather_coalesced", _same(1)),
    Operation("all_gather_single", "all_gather_into_tensor", _same(1), _moved(1), has_metric=True),
    Operation("_allgather_base", "all_gather_into_tensor", _same(1), _moved(1), has_metric=True),
    Operation("all_gather_single_coalesced", "all_gather_into_tensor", _same(1)),
    Operation("allgather_into_tensor_coalesced", "all_gather_into_tensor", _same(1)),
    Operation("gather", "gather", _same(1), has_metric=True),
    Operation("scatter", "scatter", _same(0)),
    Operation("reduce_scatter", "reduce_scatter", _same(0)),
    Operation("reduce_scatter_single", "reduce_scatter_tensor", _same(1), _reduced(1)),
    Operation("_reduce_scatter_base", "reduce_scatter_tensor", _same(1), _reduced(1)),
    Operation("reduce_scatter_single_coalesced", "reduce_scatter_tensor", _same(1)),
    Operation("reduce_scatter_tensor_coalesced", "reduce_scatter_tensor", _same(1)),
    Operation("alltoall", "all_to_all", _all_to_all, exchanges="lists"),
    Operation("alltoall_base", "all_to_all_single", _all_to_all, exchanges="parts"),
    Operation("all_to_all_single", "all_to_all_single", _all_to_all, exchanges="parts"),
    Operation("barrier", "barrier", _barrier),
    Operation("monitored_barrier", "monitored_barrier", _barrier),
    Operation("send", "send", _to_peer, _key_of_peer, to_peer=True),
    Operation("recv", "recv", _to_peer, _key_of_peer, to_peer=True),
    Operation(FROM_ANYBODY, "recv", _from_anybody, to_peer=True),
)
"""All observed operations; torch may lack some, or have two names for one."""
