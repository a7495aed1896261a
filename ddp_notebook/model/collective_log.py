"""The files in which a rank logs its collectives: their layout, and how they are read.

Memory-mapped, in the session's folder: what was written stays when the rank is killed, and is
read without asking the rank. A ring of fixed-size records, followed by the texts that records name
by number. One writer, which takes no lock: readers check afterwards that what they read was not
overwritten meanwhile. Of its last all_to_alls, a rank that refuses none writes what it brought into
a second file.
"""

from __future__ import annotations

import contextlib
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from json import dumps, loads
from typing import Any, TypeAlias

from ddp_notebook.model import codec
from ddp_notebook.model.collectives import (
    CallFacts,
    Collective,
    Collectives,
    Part,
    Phase,
    Place,
    Splits,
)
from ddp_notebook.model.ranks import Ranks

CAPACITY = 10_000
"""Records that are kept."""
TEXT_BYTES = 1 << 20
"""Room for the texts of one run; records beyond that have no text."""
DIMENSIONS = 8
"""How many sizes of a shape are kept."""

HEADER = struct.Struct("<8sQQQ")
"""Magic, the run, records written, bytes of text written."""
HEAD = struct.Struct("<QQQQQ")
"""The part of a record that differs each time: number + 1, slot, issued_ns, done_ns, and how many
backward passes had begun."""
REST = struct.Struct("<QQIIIHHHHBBBBIiiq8IQB")
"""And what is often the same: numel, bytes; the numbers of the texts of path, api and label; group,
operation, dtype and reduce_op; part, phase, how many sizes, thread * 2 + waited; tensors; root,
peer, tag; shape; held_ns, freed."""
_RECORD = struct.Struct(HEAD.format + REST.format.removeprefix("<"))
MAGIC = b"ddpring2"
# The two counts, and a record's number, `issued_ns` and `done_ns`, lie at multiples of eight: the
# writer changes each by itself through a memoryview cast to "Q", which is one store of the machine.
# So another process reads the old value or the new one, and never half of one.
WRITTEN_AT, TEXT_AT = 16, 24
RECORD_BYTES = 144
RECORDS_FROM = 64
TEXTS_FROM = RECORDS_FROM + CAPACITY * RECORD_BYTES
FILE_BYTES = TEXTS_FROM + TEXT_BYTES
DONE_OFFSET = 24
PHASE_OFFSET = 77
PEER = struct.Struct("<i")
PEER_OFFSET = 88
ISSUED_OFFSET = 16
HELD_OFFSET = 132
FREED_OFFSET = 140

_WAITED = struct.Struct("<Q8xQQ36xH6xxxxB8xi40xQ4x")
"""A record: number + 1, issued_ns, done_ns, group, thread * 2 + waited, peer, held_ns."""

PHASES = tuple(Phase)
PARTS: tuple[Part | None, ...] = (None, *Part)
NOBODY = -1
"""In place of a root or peer: none."""


@dataclass(frozen=True, slots=True)
class _Group:
    """A process group: its name, its members as ranks of the default group, how it is called.

    And after how many seconds torch gives up what is issued in it; 0: a day or more.
    """

    group: str
    members: tuple[int, ...]
    called: str = ""
    limit_s: float = 0.0


_NO_GROUP = _Group("", ())
Text: TypeAlias = str | tuple[Place, ...] | _Group
"""A name, the path to a line of the user's code, or a process group."""
_PathRows: Any = tuple[tuple[str, int, str, str], ...]


@dataclass(frozen=True)
class LogTail:
    """The newest records of one rank's log. `first` is the number of the oldest record here."""

    run: int = 0
    first: int = 0
    records: tuple[Collective, ...] = ()
    texts: tuple[Text, ...] = field(default=(), repr=False)
    text_bytes: int = 0
    """How many bytes of text `texts` were made of."""

    @property
    def groups(self) -> Mapping[str, tuple[int, ...]]:
        """Members of each group, as ranks of the default group."""
        return {text.group: text.members for text in self.texts if isinstance(text, _Group)}


def read(
    buffer: bytes | memoryview, rank: int, last: int = CAPACITY, known: LogTail | None = None
) -> LogTail:
    """The newest `last` records of the log in `buffer`; an empty tail when it is no log.

    `known` is the previous result: its texts are reused while no text was added.
    """
    if len(buffer) < FILE_BYTES or bytes(buffer[:8]) != MAGIC:
        return LogTail()
    _, run, written, text_bytes = HEADER.unpack_from(buffer)
    start = max(0, written - min(last, CAPACITY))
    raw = [
        _RECORD.unpack_from(buffer, RECORDS_FROM + number % CAPACITY * RECORD_BYTES)
        for number in range(start, written)
    ]
    if known is not None and (known.run, known.text_bytes) == (run, text_bytes):
        texts = known.texts
    else:
        texts = _texts(bytes(buffer[TEXTS_FROM : TEXTS_FROM + text_bytes]))
    # The writer may have overwritten the oldest of them since.
    _, run_now, written_now, _ = HEADER.unpack_from(buffer)
    # A record is counted only once it is whole, and the one under way has the place of the oldest
    # that is still counted: hence the + 1.
    safe = max(start, written_now - CAPACITY + 1)
    if run_now != run:
        return LogTail(run_now)
    records = tuple(_record(rank, fields, texts) for fields in raw if fields[0] - 1 >= safe)
    return LogTail(run, records[0].number if records else 0, records, texts, text_bytes)


@dataclass(frozen=True, slots=True)
class Waited:
    """The collectives of a run in which its rank waited: `spans` from issued to done, in ns.

    `groups` are those of more than a tenth of the records. `paused`: a rank was held before one.
    `to_peers`: some were sends or receives.
    """

    spans: tuple[tuple[int, int], ...] = ()
    groups: tuple[str, ...] = ()
    paused: bool = False
    to_peers: bool = False


def waited(buffer: bytes | memoryview) -> Waited:
    """Return what the rank of a log waited in. Some milliseconds: of records little is read."""
    _, _, written, text_bytes = HEADER.unpack_from(buffer)
    count = min(written, CAPACITY)
    spans, groups = [], Counter[int]()
    paused = to_peers = False
    records = bytes(buffer[RECORDS_FROM : RECORDS_FROM + count * RECORD_BYTES])
    for number, issued_ns, done_ns, group, flags, peer, held_ns in _WAITED.iter_unpack(records):
        if not number:
            continue
        groups[group] += 1
        to_peers = to_peers or peer != NOBODY
        paused = paused or held_ns > 0
        if flags & 1 and done_ns:
            spans.append((issued_ns, done_ns))
    texts = _texts(bytes(buffer[TEXTS_FROM : TEXTS_FROM + text_bytes]))
    named = {number: texts[number] for number in groups if number < len(texts)}
    names = (
        text.group
        for number, text in named.items()
        if isinstance(text, _Group) and groups[number] > count / 10
    )
    return Waited(tuple(sorted(spans)), tuple(sorted(names)), paused, to_peers)


def joined(logs: Mapping[int, LogTail], ranks: Ranks) -> Collectives:
    """The logs of several ranks as one; members of groups are `ranks` in their order."""
    groups: dict[str, Ranks] = {}
    for log in logs.values():
        for name, members in log.groups.items():
            there = tuple(ranks[member] for member in members if 0 <= member < len(ranks))
            groups.setdefault(name, there)
    return Collectives(
        {rank: log.records for rank, log in logs.items()},
        groups,
        {rank: log.first for rank, log in logs.items()},
    )


# The content is not trusted: faulty native code may write anywhere, here too. So an unreadable text
# becomes empty, and an invalid number is skipped.


def _texts(data: bytes) -> tuple[Text, ...]:
    texts: list[Text] = [""]  # number 0 is no text
    # A line each, as JSON writes a line break in a text as two characters.
    for line in data.split(b"\n")[:-1]:
        text: Text = ""
        with contextlib.suppress(ValueError, RecursionError):
            wire = loads(line)
            if isinstance(wire, dict):
                text = codec.decode(_Group, wire)
            elif isinstance(wire, list):
                # One tuple for all records of a line: paths are compared often.
                text = tuple(Place(*row) for row in codec.decode(_PathRows, wire))
            elif isinstance(wire, str):
                text = wire
        texts.append(text)
    return tuple(texts)


def _record(rank: int, fields: Sequence[int], texts: Sequence[Text]) -> Collective:
    def text(number: int) -> Text:
        return texts[number] if number < len(texts) else ""

    def name(number: int) -> str:
        found = text(number)
        return found if isinstance(found, str) else ""

    (number, slot, issued_ns, done_ns, backwards, numel, size, path, api, label) = fields[:10]
    (group, operation, dtype, reduce_op, part, phase, sizes, called) = fields[10:18]
    tensors, root, peer, tag = fields[18:22]
    known, lines = text(group), text(path)
    in_group = known if isinstance(known, _Group) else _NO_GROUP
    return Collective(
        rank=rank,
        number=number - 1,
        operation=name(operation),
        slot=slot,
        group=in_group.group,
        called=in_group.called,
        call=CallFacts(
            held_ns=fields[22 + DIMENSIONS],
            freed=bool(fields[23 + DIMENSIONS]),
            waited=bool(called & 1),
            thread=called >> 1,
            limit_s=in_group.limit_s,
        ),
        api=name(api),
        part=PARTS[part] if part < len(PARTS) else None,
        shape=tuple(fields[22 : 22 + min(sizes, DIMENSIONS)]),
        dtype=name(dtype),
        numel=numel,
        tensors=tensors,
        bytes=size,
        reduce_op=name(reduce_op),
        root=None if root == NOBODY else root,
        peer=None if peer == NOBODY else peer,
        tag=tag,
        path=lines if isinstance(lines, tuple) else (),
        label=name(label),
        phase=PHASES[phase] if phase < len(PHASES) else Phase.ISSUED,
        issued_ns=issued_ns,
        done_ns=done_ns,
        backwards=backwards,
    )


# -- what a rank brought to its last all_to_alls ---------------------------------------------

SPLITS = "splits"
"""The name of the file."""
_SPLITS_KEPT, _SPLITS_BYTES = 4, 1 << 14
SPLITS_FILE_BYTES = _SPLITS_KEPT * _SPLITS_BYTES


def write_splits(buffer: Any, number: int, splits: Splits) -> None:
    """Write the splits of the all_to_all that is the `number`th of this process, from 0."""
    data = dumps([number, codec.encode(splits)]).encode() + b"\0"
    at = number % _SPLITS_KEPT * _SPLITS_BYTES
    buffer[at : at + len(data)] = data


def read_splits(buffer: bytes) -> tuple[Splits, ...]:
    """Return the records in the file, the oldest first."""
    found: list[tuple[int, Splits]] = []
    for at in range(0, min(len(buffer), SPLITS_FILE_BYTES), _SPLITS_BYTES):
        text = buffer[at : at + _SPLITS_BYTES].partition(b"\0")[0]
        with contextlib.suppress(ValueError, RecursionError):  # none, or one that a kill has cut
            found.append(codec.decode(tuple[int, Splits], loads(text)))
    return tuple(splits for _, splits in sorted(found, key=lambda pair: pair[0]))
