"""torch's flight recorder, pickle or JSON, as collectives of one rank.

Of gloo (torch 2.5 and newer) and of NCCL. Both number what a rank issued in a group from 1. Gloo's
entries have no state of their own, and no sends and receives; JSON has no stacks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddp_notebook.evidence import plain_pickle
from ddp_notebook.evidence.frames import Frame, Sources, function_called
from ddp_notebook.evidence.plain_pickle import NotPlain
from ddp_notebook.model import DEFAULT_GROUP, Collective, Phase, codec

_MOST_ENTRIES = 50_000
_MOST_FRAMES = 200
_LONGEST = 1000
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
_PEERS = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
_RANK = re.compile(r"(\d+)(?:\.\w{1,8})?$")


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
    backend: str = ""
    stacks: bool = False


def rank_of(name: str) -> int | None:
    """The rank that a dump's file is of, which its name alone says: ``nccl_trace_rank_3``."""
    match = _RANK.search(name)
    return int(match[1]) if match and len(match[1]) < 7 else None


def parse(data: bytes) -> dict[str, Any]:
    """The content of a dump, as torch wrote it. Raises NotPlain if it is none."""
    if data[:1] == b"{":
        try:
            value = codec.loads(data, of_others=True)
        except ValueError as error:
            raise NotPlain(f"it is no whole JSON ({error})") from None
    else:
        value = plain_pickle.loads(data)
    if not isinstance(value, dict) or not isinstance(value.get("entries", []), list):
        raise NotPlain("it holds something else than entries")
    if "version" not in value or "pg_config" not in value:
        raise NotPlain("it has no version, or no process groups")
    return value


def read(wire: Mapping[str, Any], rank: int, sources: Sources) -> Dump:
    """What `parse` gave, as collectives. Entries of another form are left out."""
    groups = _groups(wire.get("pg_config"))
    entries = [e for e in wire.get("entries", [])[-_MOST_ENTRIES:] if isinstance(e, dict)]
    entries.sort(key=lambda entry: _int(entry.get("record_id")))
    records = [r for e in entries if (r := _record(e, rank, groups, sources)) is not None]
    world = groups.get(DEFAULT_GROUP, ())
    backends = [str(e.get("profiling_name", "")).partition(":")[0] for e in entries[:1]]
    return Dump(
        rank,
        tuple(records),
        groups,
        len(world),
        backends[0][:_LONGEST] if backends else "",
        any(record.path for record in records),
    )


_NUMBER = re.compile(r"-?[0-9]{1,19}")


def _int(value: object) -> int:
    """A number that JSON may have as text; 0 for anything else."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 1 << 63:
        return 0
    return value


def _text(value: object) -> str:
    return value[:_LONGEST] if isinstance(value, str) else ""


def _groups(config: object) -> dict[str, tuple[int, ...]]:
    """Members of the groups of which they are known; gloo leaves them out."""
    groups: dict[str, tuple[int, ...]] = {}
    for name, about in config.items() if isinstance(config, dict) else ():
        if not isinstance(about, dict):
            continue
        numbers = re.findall(r"\d{1,7}", str(about.get("ranks", ""))[:1_000_000])
        if numbers:
            members = tuple(sorted({int(number) for number in numbers}))
            groups[_group(_text(name), _text(about.get("desc")))] = members
    return groups


def _group(name: str, description: str) -> str:
    if description == "default_pg":
        return DEFAULT_GROUP
    return f"{name} ({description})" if description not in ("", "undefined") else name


def _record(
    entry: Mapping[str, Any],
    rank: int,
    groups: Mapping[str, tuple[int, ...]],
    sources: Sources,
) -> Collective | None:
    backend, _, operation = _text(entry.get("profiling_name")).partition(":")
    group = _group_of(entry)
    if not operation or not group or operation.startswith("coalesced"):
        return None
    message = _PEERS.match(operation)
    peer = None
    if message:
        operation, peer = message[1], _member(groups.get(group, ()), int(message[3]))
    sizes = _sizes(entry.get("output_sizes" if operation == "scatter" else "input_sizes"))
    frames = _frames(entry.get("frames"))
    api, part = function_called(frames)
    sequence = _int(entry.get("p2p_seq_id" if message else "collective_seq_id"))
    return Collective(
        rank=rank,
        number=_int(entry.get("record_id")),
        operation=_OPERATIONS.get(operation, operation),
        slot=sequence - 1,
        group=group,
        api=api,
        part=part,
        shape=sizes[0] if sizes else (),
        dtype=_dtype(entry.get("input_dtypes")) if sizes else "",
        numel=sum(math.prod(shape) for shape in sizes),
        tensors=len(sizes),
        peer=peer,
        path=sources.path(frames),
        phase=Phase.DONE if _is_done(entry, backend) else Phase.ISSUED,
        issued_ns=_int(entry.get("time_created_ns")),
        done_ns=_int(entry.get("time_discovered_completed_ns")),
    )


def _group_of(entry: Mapping[str, Any]) -> str:
    pair = entry.get("process_group")
    names = [_text(each) for each in pair[:2]] if isinstance(pair, list | tuple) else []
    return _group(*names) if len(names) == 2 else ""


def _member(members: tuple[int, ...], number: int) -> int:
    """The rank with that number in a group; the number itself where the members are not known."""
    return members[number] if number < len(members) else number


def _dtype(value: object) -> str:
    name = _text(value[0]) if isinstance(value, list) and value else ""
    return _DTYPES.get(name, name.lower())


def _is_done(entry: Mapping[str, Any], backend: str) -> bool:
    retired = backend == "gloo" and entry.get("retired") is True
    return retired or entry.get("state") == "completed"


def _sizes(value: object) -> list[tuple[int, ...]]:
    if not isinstance(value, list | tuple):
        return []
    return [
        tuple(_int(size) for size in shape[:8])
        for shape in value[:10_000]
        if isinstance(shape, list | tuple)
    ]


def _frames(value: object) -> list[Frame]:
    if not isinstance(value, list | tuple):
        return []
    return [
        Frame(_text(frame.get("filename")), _int(frame.get("line")), _text(frame.get("name")))
        for frame in value[:_MOST_FRAMES]
        if isinstance(frame, dict) and isinstance(frame.get("filename"), str)
    ]
