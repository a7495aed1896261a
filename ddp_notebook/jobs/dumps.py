"""Dumps of torch's flight recorder: read as collectives of one rank, without running their code.

A dump is a pickle or JSON, of gloo (torch 2.5 and newer) or of NCCL. Both number what a rank issued
in a group from 1. gloo's entries have no state of their own, and no sends and receives; JSON has no
stacks.

Dumps lie in folders to which others may write. A pickle of 600 bytes can stand for gigabytes: its
lists are shared by reference, and whoever turns them into text writes each of them out. So the
sizes of both input and result are bounded, and no value of unknown type is turned into text.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ddp_notebook.jobs.frames import Frame, Sources, function_called
from ddp_notebook.model import DEFAULT_GROUP, Collective, Phase, Place, codec

MOST_BYTES = 64 << 20
_MOST_VALUES = 4_000_000
"""A dump of 2000 collectives with stacks has about 200,000. An empty list is one byte of a file,
and 56 in memory."""


class NotPlain(ValueError):
    """No dump of torch's, or one of more than plain values; the message says what is in it."""


@dataclass(frozen=True)
class Dump:
    """The content of one rank's flight recorder.

    `stacks` is true where it says where in the user's code each collective was issued; `groups` has
    the members of those groups of which that is known, as ranks of the default group.
    """

    rank: int
    records: tuple[Collective, ...] = ()
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    world_size: int = 0
    stacks: bool = False


def rank_of(name: str) -> int | None:
    """Return the rank that a dump's file is of, by its name: ``nccl_trace_rank_3``."""
    match = re.search(r"(\d{1,6})(?:\.\w{1,8})?$", name)
    return int(match[1]) if match else None


def parse(data: bytes) -> dict[str, Any]:
    """Return the content of a dump, as torch wrote it. Raises NotPlain for anything else."""
    if data[:1] == b"{":
        if sum(map(data.count, (b",", b"[", b"{"))) > _MOST_VALUES:
            raise NotPlain(f"it has more than {_MOST_VALUES:,} values")
        try:
            value = codec.loads(data, of_others=True)
        except (ValueError, MemoryError) as error:
            raise NotPlain(f"it is not complete JSON ({error or 'too little memory'})") from None
    else:
        value = unpickled(data)
    if not isinstance(value, dict) or not isinstance(value.get("entries", []), list):
        raise NotPlain("its entries are not a list")
    if "version" not in value or "pg_config" not in value:
        raise NotPlain("it has no version, or no process groups")
    return value


# -- pickles ---------------------------------------------------------------------------------


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise NotPlain(f"it holds more than plain values ({module}.{name})")


def unpickled(data: bytes) -> Any:
    """Return the value in a pickle of dicts, lists, tuples, texts and numbers. Raises NotPlain."""
    try:
        # The opcodes are checked first, which builds nothing: one that is not in our list is
        # refused before Python's reader sees it, so `find_class` is only a second check. Then
        # Python's own reader builds the value: a reader of ours would be one more to maintain.
        _check(data)
        return _Unpickler(io.BytesIO(data)).load()
    except NotPlain:
        raise
    except (LookupError, EOFError, pickle.UnpicklingError):
        raise NotPlain("it is not a complete pickle") from None
    except (TypeError, ValueError, AttributeError, RecursionError, MemoryError) as error:
        raise NotPlain(str(error) or type(error).__name__) from None


_SCALARS = frozenset(
    [
        "NONE",
        "NEWTRUE",
        "NEWFALSE",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "BINFLOAT",
        "SHORT_BINUNICODE",
        "BINUNICODE",
        "BINUNICODE8",
        "SHORT_BINBYTES",
        "BINBYTES",
        "EMPTY_TUPLE",
    ]
)
_CONTAINERS = frozenset(["EMPTY_DICT", "EMPTY_LIST", "APPEND", "APPENDS", "SETITEM", "SETITEMS"])
_TUPLES = {"TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _check(data: bytes) -> None:
    """Refuse what Python's reader would work on without end. Raises NotPlain, ValueError.

    Beside all opcodes that make other objects these are two things. The reader, in C, makes its
    memo as large as the largest index in the pickle. And it hashes each key of a dict: the hash of
    a tuple that holds one tuple twice, which holds another one twice, and so on 40 times, takes
    years. So an index is at most the number of opcodes before it, and a tuple that holds tuples,
    lists or dicts cannot be used twice.
    """
    parts: list[str] = []  # what the opcodes since the last mark have put on the stack
    memo: dict[int, str] = {}
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        name = opcode.name
        if count > _MOST_VALUES:
            raise NotPlain(f"it has more than {_MOST_VALUES:,} values")
        if name in _SCALARS:
            parts.append("scalar")
        elif name in _CONTAINERS:
            parts.append("container")
        elif name in _TUPLES:
            size = _TUPLES[name] or len(parts)
            is_flat = len(parts) >= size and all(p == "scalar" for p in parts[len(parts) - size :])
            parts.append("flat" if is_flat else "nested")
        elif name == "MARK":
            parts = []
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            index = len(memo) if name == "MEMOIZE" else int(argument or 0)
            if index > count:
                raise NotPlain("it is not a complete pickle")
            memo[index] = parts[-1] if parts else "nested"
        elif name in ("BINGET", "LONG_BINGET"):
            parts.append(memo[int(argument or 0)])
            if parts[-1] == "nested":
                raise NotPlain("it uses a tuple of tuples or lists twice")
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise NotPlain(f"it holds more than plain values ({name})")


# -- what torch wrote ------------------------------------------------------------------------

_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Byte": "uint8",
    "Char": "int8",
    "Bool": "bool",
}
_OPERATIONS = {
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "all_reduce_barrier": "barrier",
}
_PEERS = re.compile(r"(send|recv) (\d{1,9})(?:->|<-)(\d{1,9})")


def read(wire: Mapping[str, Any], rank: int, sources: Sources, most_records: int = 50_000) -> Dump:
    """Return what `parse` gave, as collectives. Entries of another form are left out."""
    groups = _groups(wire.get("pg_config"))
    # torch's own buffer has 2000 by default, and users set it to 20,000 or so: the last ones tell.
    entries = [e for e in wire.get("entries", [])[-most_records:] if isinstance(e, dict)]
    entries.sort(key=lambda entry: _int(entry.get("record_id")))
    # In a training loop most entries have one of a few stacks. A pickle shares the list, and so it
    # need not be read again; JSON does not share, and has no stacks either.
    shared = _Shared(sources)
    records = [r for e in entries if (r := _record(e, rank, groups, shared)) is not None]
    world_size = len(groups.get(DEFAULT_GROUP, ()))
    return Dump(rank, tuple(records), groups, world_size, any(record.path for record in records))


class _Shared:
    """Converts each list that entries of a dump share once."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._stacks: dict[int, tuple[str, Any, tuple[Place, ...]]] = {}
        self._sizes: dict[int, tuple[tuple[int, ...], int, int]] = {}

    def stack(self, value: object) -> tuple[str, Any, tuple[Place, ...]]:
        """Return the function that was called, the part of DDP that did, and the user's lines."""
        if id(value) not in self._stacks:
            frames = [
                Frame(_text(f.get("filename")), _int(f.get("line")), _text(f.get("name")))
                for f in (value[:200] if isinstance(value, list | tuple) else ())
                if isinstance(f, dict) and isinstance(f.get("filename"), str)
            ]
            self._stacks[id(value)] = (*function_called(frames), self._sources.path(frames))
        return self._stacks[id(value)]

    def sizes(self, value: object) -> tuple[tuple[int, ...], int, int]:
        """Return the shape of the first tensor, how many elements all have, and how many they are.

        All three are 0 or empty where the dump has no shapes.
        """
        if id(value) not in self._sizes:
            shapes = [
                tuple(_int(size) for size in shape[:8])
                for shape in (value[:10_000] if isinstance(value, list | tuple) else ())
                if isinstance(shape, list | tuple)
            ]
            first = shapes[0] if shapes else ()
            self._sizes[id(value)] = first, sum(map(math.prod, shapes)), len(shapes)
        return self._sizes[id(value)]


def _int(value: object) -> int:
    """Return a number that JSON may have as text; 0 for anything else."""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,19}", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 1 << 63:
        return 0
    return value


def _text(value: object) -> str:
    return str(codec.readable(value[:1000])) if isinstance(value, str) else ""


def _groups(config: object) -> dict[str, tuple[int, ...]]:
    """Return the members of each group, where they are known; gloo leaves them out.

    torch writes them as text, ``"[0, 1, 2]"``.
    """
    groups: dict[str, tuple[int, ...]] = {}
    # By identity: a million groups that share one long text must not parse it a million times. The
    # values live as long as `config` does, so no number is given to another one meanwhile.
    known: dict[int, tuple[int, ...]] = {}
    for name, about in list(config.items())[:10_000] if isinstance(config, dict) else ():
        ranks = about.get("ranks") if isinstance(about, dict) else None
        if id(ranks) not in known:
            # Never str() of it: of nested lists that share their parts that is gigabytes.
            if isinstance(ranks, str):
                numbers = [int(number) for number in re.findall(r"\d{1,7}", ranks[:1_000_000])]
            else:
                listed = ranks[:100_000] if isinstance(ranks, list | tuple) else ()
                numbers = [_int(rank) for rank in listed if isinstance(rank, int)]
            known[id(ranks)] = tuple(sorted(set(numbers)))
        if known[id(ranks)]:
            groups[_group(_text(name), _text(about.get("desc")))] = known[id(ranks)]
    return groups


def _group(name: str, description: str) -> str:
    if description == "default_pg":
        return DEFAULT_GROUP
    return f"{name} ({description})" if description not in ("", "undefined") else name


def _record(
    entry: Mapping[str, Any], rank: int, groups: Mapping[str, tuple[int, ...]], shared: _Shared
) -> Collective | None:
    # `nccl:all_reduce`, `gloo:_all_gather_base`: the names are those of C++ functions, which differ
    # from Python's.
    backend, _, operation = _text(entry.get("profiling_name")).partition(":")
    pair = entry.get("process_group")
    names = [_text(each) for each in pair[:2]] if isinstance(pair, list | tuple) else []
    group = _group(*names) if len(names) == 2 else ""
    if not operation or not group or operation.startswith("coalesced"):
        return None
    peer = None
    message = _PEERS.match(operation)
    if message:
        members = groups.get(group, ())
        operation, peer = message[1], int(message[3])
        peer = members[peer] if peer < len(members) else peer
    sizes = entry.get("output_sizes" if operation == "scatter" else "input_sizes")
    shape, numel, tensors = shared.sizes(sizes)
    dtypes = entry.get("input_dtypes")
    dtype = _text(dtypes[0]) if tensors and isinstance(dtypes, list) and dtypes else ""
    api, part, path = shared.stack(entry.get("frames"))
    retired = backend == "gloo" and entry.get("retired") is True
    return Collective(
        rank=rank,
        number=_int(entry.get("record_id")),
        operation=_OPERATIONS.get(operation, operation),
        slot=_int(entry.get("p2p_seq_id" if message else "collective_seq_id")) - 1,
        group=group,
        api=api,
        part=part,
        shape=shape,
        dtype=_DTYPES.get(dtype, dtype.lower()),
        numel=numel,
        tensors=tensors,
        peer=peer,
        path=path,
        phase=Phase.DONE if retired or entry.get("state") == "completed" else Phase.ISSUED,
        issued_ns=_int(entry.get("time_created_ns")),
        done_ns=_int(entry.get("time_discovered_completed_ns")),
    )
