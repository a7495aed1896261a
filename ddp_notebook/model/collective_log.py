"""The file in which a rank writes down its collectives, as both ends know it.

Memory-mapped, in the session's folder: what was written stays when the rank is killed, and is
read without asking it. Fixed records in a ring, and behind them the texts that they name by
number. One writer; readers check afterwards that what they read was not overwritten.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddp_notebook.model.collectives import Collective, Part, Phase, Place

CAPACITY = 10_000
"""Records that are kept."""
TEXT_BYTES = 1 << 20
"""Room for the texts of one run; what comes after that is not named."""
DIMENSIONS = 8
"""Of a shape, as many sizes as are kept."""

HEADER = struct.Struct("<8sQQQ")
"""Magic, the run, records written, bytes of text written."""
HEAD = struct.Struct("<QQQQQ")
"""Of a record, what is different each time: number + 1, slot, issued_ns, done_ns, and how many
backward passes had begun."""
REST = struct.Struct("<QQIIIHHHHBBBBIiiq8I")
"""And what is often the same: numel, bytes; the numbers of the texts of path, api and label; group,
operation, dtype and reduce_op; part, phase, how many sizes, padding; tensors; root, peer, tag;
shape."""
MAGIC = b"ddpring1"
WRITTEN_AT, TEXT_AT = 16, 24
RECORD_BYTES = 136
RECORDS_FROM = 64
TEXTS_FROM = RECORDS_FROM + CAPACITY * RECORD_BYTES
FILE_BYTES = TEXTS_FROM + TEXT_BYTES
DONE_OFFSET = 24
PHASE_OFFSET = 77

PHASES = tuple(Phase)
PARTS: tuple[Part | None, ...] = (None, *Part)
NOBODY = -1
"""In place of a root or peer: there is none."""


@dataclass(frozen=True)
class RankRing:
    """What one rank wrote down in one run. `first` is the number of its oldest record here."""

    run: int = 0
    first: int = 0
    records: tuple[Collective, ...] = ()
    texts: tuple[Any, ...] = field(default=(), repr=False)
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Members of each group, as ranks of the default group."""
    text_bytes: int = 0
    """How many bytes of text `texts` were made of."""


def read(
    buffer: bytes | memoryview, rank: int, last: int = CAPACITY, known: RankRing | None = None
) -> RankRing:
    """The newest `last` records of the ring in `buffer`; an empty ring when it is none.

    `known` is what was read before: while no text was added, its texts are not read again.
    """
    if len(buffer) < FILE_BYTES or bytes(buffer[:8]) != MAGIC:
        return RankRing()
    _, run, written, text_bytes = HEADER.unpack_from(buffer)
    start = max(0, written - min(last, CAPACITY))
    raw = [
        _unpacked(buffer, RECORDS_FROM + number % CAPACITY * RECORD_BYTES)
        for number in range(start, written)
    ]
    if known is not None and (known.run, known.text_bytes) == (run, text_bytes):
        texts = known.texts
    else:
        texts = _texts(bytes(buffer[TEXTS_FROM : TEXTS_FROM + text_bytes]))
    # Records of one line share its path: that is compared often.
    paths = {
        number: tuple(Place(*place) for place in text)
        for number, text in enumerate(texts)
        if isinstance(text, list)
    }
    # What was written meanwhile may have gone over the oldest of them.
    _, run_now, written_now, _ = HEADER.unpack_from(buffer)
    safe = max(start, written_now - CAPACITY + 1)
    if run_now != run:
        return RankRing(run_now)
    records = tuple(_record(rank, each, texts, paths) for each in raw if each[0] - 1 >= safe)
    groups = {
        text["group"]: tuple(text["members"])
        for text in texts
        if isinstance(text, dict) and "group" in text
    }
    first = records[0].number if records else 0
    return RankRing(run, first, records, texts, groups, text_bytes)


def _unpacked(buffer: bytes | memoryview, at: int) -> tuple[Any, ...]:
    return HEAD.unpack_from(buffer, at) + REST.unpack_from(buffer, at + HEAD.size)


def _texts(data: bytes) -> tuple[Any, ...]:
    found: list[Any] = [""]  # number 0: no text
    for line in data.split(b"\n")[:-1]:
        try:
            found.append(json.loads(line))
        except ValueError:
            found.append("")
    return tuple(found)


def _record(
    rank: int,
    raw: Sequence[int],
    texts: Sequence[Any],
    paths: Mapping[int, tuple[Place, ...]],
) -> Collective:
    # Whatever stands there: native code that goes wrong writes where it will, here too.
    def text(number: int) -> str:
        found = texts[number] if number < len(texts) else ""
        return found if isinstance(found, str) else ""

    (number, slot, issued_ns, done_ns, backwards, numel, size, path, api, label) = raw[:10]
    (group, operation, dtype, reduce_op, part, phase, sizes, _) = raw[10:18]
    tensors, root, peer, tag = raw[18:22]
    group_text = texts[group] if group < len(texts) else None
    return Collective(
        rank=rank,
        number=number - 1,
        operation=text(operation),
        slot=slot,
        group=group_text["group"] if isinstance(group_text, dict) else "",
        api=text(api),
        part=PARTS[part] if part < len(PARTS) else None,
        shape=tuple(raw[22 : 22 + min(sizes, DIMENSIONS)]),
        dtype=text(dtype),
        numel=numel,
        tensors=tensors,
        bytes=size,
        reduce_op=text(reduce_op),
        root=None if root == NOBODY else root,
        peer=None if peer == NOBODY else peer,
        tag=tag,
        path=paths.get(path, ()),
        label=text(label),
        phase=PHASES[phase] if phase < len(PHASES) else Phase.ISSUED,
        issued_ns=issued_ns,
        done_ns=done_ns,
        backwards=backwards,
    )
