"""The operations of a process group: torch's methods, their names, and what a call is about."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
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


_Reader = Callable[[Sequence[Any], Mapping[str, Any]], Facts]
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
    facts: _Reader
    key: _Key
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


_REDUCE_NAMES: dict[Any, str] = {}


def reduce_name(options: Any) -> str:
    """SUM, MAX and so on of an options object; empty without one."""
    kind = getattr(options, "reduceOp", None)
    if kind is None:
        return ""
    number = getattr(kind, "op", kind)
    name = _REDUCE_NAMES.get(number)
    if name is None:
        text = str(number).rpartition(".")[2]  # RedOpType.SUM, or <RedOpType.SUM: 0>
        name = _REDUCE_NAMES[number] = text.rstrip(">").partition(":")[0]
    return name


def _options(args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """The options object of a call, wherever it stands; None without one."""
    found = named.get("opts")
    if found is None and args and hasattr(args[-1], "asyncOp"):
        found = args[-1]
    return found


def _flat(value: Any) -> Sequence[torch.Tensor]:
    """The tensors of an argument: a tensor, a list of them, a list of such lists."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if not value:
        return ()
    flat: Sequence[torch.Tensor] = value if isinstance(value[0], torch.Tensor) else value[0]
    return flat


def _waited(options: Any) -> bool:
    # Missing options: the call comes from C++ or from user code that got the work itself.
    return options is not None and not options.asyncOp


def _key_of_reduced(position: int, *, rooted: bool = False) -> _Key:
    """The key of a call with one tensor at `position`, in a list or by itself, and options last."""

    def key(args: Sequence[Any]) -> Hashable:
        tensor, options = args[position], args[-1]
        if type(tensor) is list:
            (tensor,) = tensor
        root = options.rootRank if rooted else None
        # By its hash: the object is made anew each time it is read.
        return (tensor.shape, tensor.dtype, hash(options.reduceOp), root, options.asyncOp)

    return key


def _key_of_moved(position: int, *, rooted: bool = False) -> _Key:
    """Return the facts of a call that reduces nothing."""

    def key(args: Sequence[Any]) -> Hashable:
        tensor, options = args[position], args[-1]
        if type(tensor) is list:
            (tensor,) = tensor
        root = options.rootRank if rooted else None
        return (tensor.shape, tensor.dtype, root, options.asyncOp)

    return key


def _no_key(args: Sequence[Any]) -> Hashable:
    return None


def _key_of_peer(args: Sequence[Any]) -> Hashable:
    tensors, peer, tag = args
    if len(tensors) != 1:
        return None
    return (tensors[0].shape, tensors[0].dtype, peer, tag)


def _same(position: int, name: str) -> _Reader:
    """Every rank must bring tensors of the same shape: argument `position`, or `name`."""

    def read(args: Sequence[Any], named: Mapping[str, Any]) -> Facts:
        options = _options(args, named)
        tensors = _flat(args[position] if len(args) > position else named.get(name))
        facts = _sizes(tensors)
        root = getattr(options, "rootRank", None)
        reduce_op = reduce_name(options)
        shapes = tuple(_extent(t) for t in tensors)
        must_match = (shapes, facts.dtype, reduce_op, root)
        return facts._replace(
            must_match=must_match, reduce_op=reduce_op, root=root, waited=_waited(options)
        )

    return read


def _extent(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its shape, without dimensions of size 1: they change nothing in what is sent."""
    return tuple(size for size in tensor.shape if size != 1)


def _sizes(tensors: Sequence[torch.Tensor]) -> Facts:
    if not tensors:
        return Facts()
    first = tensors[0]
    numel = first.numel() if len(tensors) == 1 else sum(t.numel() for t in tensors)
    return Facts(
        shape=tuple(first.shape),
        dtype=dtype_name(first.dtype),
        numel=numel,
        bytes=numel * first.element_size(),
        tensors=len(tensors),
    )


def _gathered(args: Sequence[Any], named: Mapping[str, Any]) -> Facts:
    """all_gather: what a rank brings must be what the others make room for at its place."""
    facts = _same(1, "input_tensors")(args, named)
    outputs = _flat(args[0] if args else named.get("output_tensors"))
    shapes = {tuple(t.shape) for t in outputs}
    if len(shapes) > 1:  # legal where the backend can: every rank has the same list
        rooms: tuple[Any, ...] = tuple(tuple(t.shape) for t in outputs)
        return facts._replace(must_match=(rooms, *facts.must_match[1:]))
    return facts


def _all_to_all(args: Sequence[Any], named: Mapping[str, Any]) -> Facts:
    """Sizes may differ from rank to rank; only the dtype must be the same."""
    facts = _same(1, "input")(args, named)
    return facts._replace(must_match=(facts.dtype,))


def _barrier(args: Sequence[Any], named: Mapping[str, Any]) -> Facts:
    return Facts(waited=_waited(_options(args, named)))


def _to_peer(args: Sequence[Any], named: Mapping[str, Any]) -> Facts:
    peer = named.get("dstRank", named.get("srcRank", args[1] if len(args) > 1 else None))
    tag = named.get("tag", args[2] if len(args) > 2 else 0)
    facts = _sizes(_flat(args[0] if args else named.get("tensors")))
    return facts._replace(peer=int(peer) if peer is not None else None, tag=int(tag))


def _from_anybody(args: Sequence[Any], named: Mapping[str, Any]) -> Facts:
    tag = named.get("tag", args[1] if len(args) > 1 else 0)
    facts = _sizes(_flat(args[0] if args else named.get("tensors")))
    return facts._replace(tag=int(tag))


ALL_REDUCE, FROM_ANYBODY = "allreduce", "recv_anysource"
"""torch's method for a recv without a source."""
OPERATIONS = (
    Operation(ALL_REDUCE, "all_reduce", _same(0, "tensors"), _key_of_reduced(0), has_metric=True),
    Operation("allreduce_coalesced", "all_reduce_coalesced", _same(0, "tensors"), _no_key),
    Operation(
        "broadcast",
        "broadcast",
        _same(0, "tensors"),
        _key_of_moved(0, rooted=True),
        has_metric=True,
    ),
    Operation(
        "reduce", "reduce", _same(0, "tensors"), _key_of_reduced(0, rooted=True), has_metric=True
    ),
    Operation("allgather", "all_gather", _gathered, _no_key, has_metric=True),
    Operation("allgather_coalesced", "all_gather_coalesced", _same(1, "input_list"), _no_key),
    Operation(
        "all_gather_single",
        "all_gather_into_tensor",
        _same(1, "input"),
        _key_of_moved(1),
        has_metric=True,
    ),
    Operation(
        "_allgather_base",
        "all_gather_into_tensor",
        _same(1, "input"),
        _key_of_moved(1),
        has_metric=True,
    ),
    Operation("all_gather_single_coalesced", "all_gather_into_tensor", _same(1, "inputs"), _no_key),
    Operation(
        "allgather_into_tensor_coalesced", "all_gather_into_tensor", _same(1, "inputs"), _no_key
    ),
    Operation("gather", "gather", _same(1, "input_tensors"), _no_key, has_metric=True),
    Operation("scatter", "scatter", _same(0, "output_tensors"), _no_key),
    Operation("reduce_scatter", "reduce_scatter", _same(0, "output_tensors"), _no_key),
    Operation(
        "reduce_scatter_single",
        "reduce_scatter_tensor",
        _same(1, "inputTensor"),
        _key_of_reduced(1),
    ),
    Operation(
        "_reduce_scatter_base", "reduce_scatter_tensor", _same(1, "inputTensor"), _key_of_reduced(1)
    ),
    Operation(
        "reduce_scatter_single_coalesced", "reduce_scatter_tensor", _same(1, "inputs"), _no_key
    ),
    Operation(
        "reduce_scatter_tensor_coalesced", "reduce_scatter_tensor", _same(1, "inputs"), _no_key
    ),
    Operation("alltoall", "all_to_all", _all_to_all, _no_key, exchanges="lists"),
    Operation("alltoall_base", "all_to_all_single", _all_to_all, _no_key, exchanges="parts"),
    Operation("all_to_all_single", "all_to_all_single", _all_to_all, _no_key, exchanges="parts"),
    Operation("barrier", "barrier", _barrier, _no_key),
    Operation("monitored_barrier", "monitored_barrier", _barrier, _no_key),
    Operation("send", "send", _to_peer, _key_of_peer, to_peer=True),
    Operation("recv", "recv", _to_peer, _key_of_peer, to_peer=True),
    Operation(FROM_ANYBODY, "recv", _from_anybody, _no_key, to_peer=True),
)
"""All observed operations; torch may lack some, or have two names for one."""
