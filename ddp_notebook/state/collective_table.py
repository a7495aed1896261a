"""Who stands before which collective, who waits in one, and for whom: a table of a step."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_notebook.model import (
    Collective,
    Collectives,
    Part,
    Phase,
    Ranks,
    StepRow,
    StepTable,
    format_bytes,
)

_DOCUMENTED = "https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed."
_ABOUT = {
    "all_reduce": "Every rank brings a tensor; each gets the sum (or MAX, MIN, ...) of them all.",
    "broadcast": "One rank's tensor is copied to all the others.",
    "barrier": "Nobody goes on before everybody is here.",
    "all_gather": "Every rank brings a tensor; each gets all of them.",
    "all_gather_into_tensor": "Every rank brings a tensor; each gets all of them, in one tensor.",
    "reduce": "The sum of all ranks' tensors is given to one rank.",
    "gather": "All ranks' tensors are given to one rank.",
    "scatter": "One rank gives each rank a tensor of its own.",
    "reduce_scatter": "The sum of all ranks' tensors is computed, and each rank gets a part of it.",
    "all_to_all": "Each rank gives each other rank a tensor of its own.",
    "send": "A tensor for one other rank, which must call recv.",
    "recv": "A tensor from one other rank, which must call send.",
}

OPERATIONS = tuple(_ABOUT)
"""What `%ddp_step --to` takes."""

_Row = tuple[str, str, str, Ranks]


def step_table(
    collectives: Collectives, members: Ranks, pending: Ranks, now_ns: int = 0
) -> StepTable:
    """Where the ranks of a cell stand. `pending` are those that have not finished it."""
    latest = {rank: collectives.of[rank][-1] for rank in members if collectives.of.get(rank)}
    awaited_by = Awaited(collectives).by
    told: dict[_Row, list[int]] = {}
    since: dict[_Row, float] = {}
    for rank in members:
        record = latest.get(rank)
        state = _state(record, rank in pending)
        text = describe(record, collectives.of[rank]) if record and rank in pending else ""
        awaited = awaited_by(record) if record and state == "waiting" else ()
        issued = record.number + (not is_held(record)) if record is not None else 0
        row = (f"{issued} issued", state, text, awaited)
        told.setdefault(row, []).append(rank)
        if record is not None and now_ns and rank in pending:
            since[row] = max(since.get(row, 0.0), (now_ns - record.issued_ns) / 1e9)
    rows = tuple(StepRow(tuple(ranks), *row, since.get(row, 0.0)) for row, ranks in told.items())
    held = [latest[rank] for rank in pending if rank in latest and is_held(latest[rank])]
    about = _ABOUT.get(held[0].operation, "") if held else ""
    link = f"{_DOCUMENTED}{held[0].operation}" if about else ""
    return StepTable(_title(rows, pending), rows, about, link, _next(held, pending))


def is_held(record: Collective) -> bool:
    """True when its rank stands before it."""
    return record.phase is Phase.HELD


def _state(record: Collective | None, pending: bool) -> str:
    if not pending:
        return "done"
    if record is None:
        return "busy"
    if is_held(record):
        return "paused"
    return "busy" if record.over else "waiting"


def describe(record: Collective, before: Sequence[Collective] = ()) -> str:
    """``all_reduce of float32 [28] (112 B), DDP's backward, bucket 2 of 3, train.py:41``."""
    kind = f"({record.reduce_op})" if record.reduce_op not in ("", "SUM") else ""
    words = [f"{record.operation}{kind}"]
    if record.dtype:
        size = format_bytes(record.bytes)
        words[0] += f" of {record.dtype} {list(record.shape)} ({size})"
    if record.peer is not None:
        words[0] += f" {'to' if record.operation == 'send' else 'from'} rank {record.peer}"
    if record.part is Part.BACKWARD:
        bucket, of = buckets(record, before)
        words.append(f"bucket {bucket}{f' of {of}' if of else ''} of DDP's backward")
    elif record.part is Part.FORWARD:
        words.append("DDP's forward (buffers, new buckets)")
    elif record.part is Part.CONSTRUCTOR:
        words.append("DDP's constructor")
    elif record.api not in ("", record.operation):
        words.append(record.api)
    if record.label:
        words.append(repr(record.label))
    if record.place is not None:
        words.append(str(record.place))
    return ", ".join(words)


def buckets(record: Collective, before: Sequence[Collective]) -> tuple[int, int]:
    """Which bucket of its backward a record is, from 1, and how many an earlier one had (or 0)."""
    counts: list[int] = []
    last: Collective | None = None
    for each in before:
        if each.number > record.number:
            break
        if each.part is Part.BACKWARD and each.path == record.path:
            if last is not None and last.backwards == each.backwards:
                counts[-1] += 1
            else:
                counts.append(1)
            last = each
    if not counts:
        return 1, 0
    earlier = counts[-2] if len(counts) > 1 else 0
    return counts[-1], earlier if earlier >= counts[-1] else 0


class Awaited:
    """Who has not come to a collective: asked for many ranks, most of which wait in the same."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._missing: dict[tuple[str, int], Ranks] = {}

    def by(self, record: Collective) -> Ranks:
        """The ranks that have not come to what `record`'s rank waits in."""
        if record.is_point_to_point:
            return (record.peer,) if record.peer is not None else ()
        key = (record.group, record.slot)
        if key not in self._missing:
            members = self._collectives.groups.get(record.group, ())
            self._missing[key] = tuple(each for each in members if not self._came(each, record))
        return self._missing[key]

    def _came(self, rank: int, record: Collective) -> bool:
        return any(
            each.slot >= record.slot
            and each.group == record.group
            and not each.is_point_to_point
            and not is_held(each)
            for each in reversed(self._collectives.of.get(rank, ()))
        )


def _title(rows: Sequence[StepRow], pending: Ranks) -> str:
    if not pending:
        return "The cell has finished on every rank."
    if any(row.state == "paused" for row in rows):
        return "Ranks are held before their next collective."
    return "No rank is held: those that wait, wait for others."


def _next(held: Sequence[Collective], pending: Ranks) -> str:
    if not pending:
        return ""
    if held:
        return (
            "%ddp_step, or one rank alone: %ddp_step --ranks 0, or to the end: %ddp_step --to end"
        )
    return "%ddp_why"
