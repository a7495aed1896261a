"""Who is paused before which collective, who waits in one, and for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ddp_notebook.model import (
    Collective,
    Collectives,
    Part,
    Phase,
    Ranks,
    StepRow,
    StepTable,
    format_bytes,
    name_ranks,
)

_DOCUMENTED = "https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed."
_ABOUT = {
    "all_reduce": "Every rank brings a tensor; each gets the sum (or MAX, MIN, ...) of them all.",
    "broadcast": "One rank's tensor is copied to all the others.",
    "barrier": "No rank continues until every rank has called it.",
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
"""The values of `%ddp_step --to`."""

_Row = tuple[str, str, str, Ranks, float]


def step_table(
    collectives: Collectives,
    members: Ranks,
    pending: Ranks,
    now_ns: int = 0,
    *,
    what: str = "The cell",
    failures: Mapping[int, str] = MappingProxyType({}),
) -> StepTable:
    """The step table of the run `what`, as it begins a sentence.

    `pending` are the ranks that have not left it. `failures` says how ranks left it that did not
    finish it.
    """
    latest = {rank: collectives.of[rank][-1] for rank in members if collectives.of.get(rank)}
    missing = MissingRanks(collectives)
    ranks_of: dict[_Row, list[int]] = {}
    since: dict[_Row, float] = {}
    for rank in members:
        record = latest.get(rank)
        failure = failures.get(rank, "")
        row = _row(record, rank in pending, collectives, missing, failure)
        ranks_of.setdefault(row, []).append(rank)
        if record is not None and now_ns and rank in pending:
            since[row] = max(since.get(row, 0.0), (now_ns - record.issued_ns) / 1e9)
    rows = tuple(
        StepRow(tuple(ranks), *row[:-1], since.get(row, 0.0), row[-1])
        for row, ranks in ranks_of.items()
    )
    paused = next((row for row in rows if row.state == "paused"), None)
    operation = latest[paused.ranks[0]].operation if paused is not None else ""
    about = _ABOUT.get(operation, "")
    link = f"{_DOCUMENTED}{operation}" if about else ""
    title, call = _title(rows, pending, what), _next(bool(operation), pending)
    return StepTable(title, rows, about, link, call)


def _row(
    record: Collective | None,
    pending: bool,
    collectives: Collectives,
    missing: MissingRanks,
    failure: str,
) -> _Row:
    """What is equal for ranks that share a row."""
    state = "failed" if failure else _state(record, pending)
    if record is None:
        return "0 issued", state, failure, (), 0.0
    text = describe(record, collectives.of[record.rank]) if pending else failure
    waits_for = missing.of(record) if state == "waiting" else ()
    passed = f"{record.number + (not is_paused(record))} issued"
    return passed, state, text, waits_for, record.call.limit_s if state == "waiting" else 0.0


def is_paused(record: Collective) -> bool:
    """True when its rank is paused before it."""
    return record.phase is Phase.HELD


def _state(record: Collective | None, pending: bool) -> str:
    if not pending:
        return "done"
    if record is None:
        return "busy"
    if is_paused(record):
        return "paused"
    return "busy" if record.over else "waiting"


def describe(record: Collective, before: Sequence[Collective] = ()) -> str:
    """``all_reduce of float32 [28] (112 B), DDP's backward, bucket 2 of 3, train.py:41``."""
    kind = f"({record.reduce_op})" if record.reduce_op not in ("", "SUM") else ""
    what = f"{record.operation}{kind}"
    if record.dtype:
        what += f" of {record.dtype} {list(record.shape)} ({format_bytes(record.bytes)})"
    if record.peer is not None:
        what += f" {'to' if record.operation == 'send' else 'from'} rank {record.peer}"
    label = repr(record.label) if record.label else ""
    site = str(record.place) if record.place is not None else ""
    return ", ".join(filter(None, (what, _origin(record, before), label, site)))


def _origin(record: Collective, before: Sequence[Collective]) -> str:
    """Which part of DDP or function of torch issued it; empty if that is obvious."""
    match record.part:
        case Part.BACKWARD:
            bucket, of = buckets(record, before)
            return f"bucket {bucket}{f' of {of}' if of else ''} of DDP's backward"
        case Part.FORWARD:
            return "DDP's forward (buffers, new buckets)"
        case Part.CONSTRUCTOR:
            return "DDP's constructor"
        case _:
            return record.api if record.api != record.operation else ""


def buckets(record: Collective, before: Sequence[Collective]) -> tuple[int, int]:
    """Which bucket of its backward a record is, from 1, and how many an earlier one had (or 0)."""
    counts: list[int] = []
    last: Collective | None = None
    for other in before:
        if other.number > record.number:
            break
        if other.part is Part.BACKWARD and other.path == record.path:
            if last is not None and last.backwards == other.backwards:
                counts[-1] += 1
            else:
                counts.append(1)
            last = other
    if not counts:
        return 1, 0
    earlier = counts[-2] if len(counts) > 1 else 0
    return counts[-1], earlier if earlier >= counts[-1] else 0


class MissingRanks:
    """Which ranks have not issued a collective. Cached: most ranks wait in the same one."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._missing: dict[tuple[str, int], Ranks] = {}

    def of(self, record: Collective) -> Ranks:
        """The ranks that have not issued the collective in which `record`'s rank waits."""
        if record.is_point_to_point:
            return (record.peer,) if record.peer is not None else ()
        key = (record.group, record.slot)
        if key not in self._missing:
            members = self._collectives.groups.get(record.group, ())
            self._missing[key] = tuple(m for m in members if not self._issued(m, record))
        return self._missing[key]

    def _issued(self, rank: int, record: Collective) -> bool:
        return any(
            other.slot >= record.slot
            and other.group == record.group
            and not other.is_point_to_point
            and not is_paused(other)
            for other in reversed(self._collectives.of.get(rank, ()))
        )


def of_run(records: Sequence[Collective], left_ns: Mapping[int, int]) -> tuple[Collective, ...]:
    """The records that a run's code issued. `left_ns`: when each rank has left the run.

    What no line of the user's issues after that is set-up's: %ddp_abort builds a group and checks
    it, minutes later perhaps.
    """
    return tuple(
        record
        for record in records
        if record.path or record.issued_ns <= left_ns.get(record.rank, record.issued_ns)
    )


def collectives_at(collectives: Collectives, at_ns: int) -> Collectives:
    """The collectives called by `at_ns`, in the phase that they were in then."""
    of = {
        rank: tuple(_at(record, at_ns) for record in issued if called_ns(record) <= at_ns)
        for rank, issued in collectives.of.items()
    }
    return replace(collectives, of=of)


def called_ns(record: Collective) -> int:
    """When the rank called it; it was issued later if the rank was paused."""
    return record.issued_ns - record.call.held_ns


def _at(record: Collective, at_ns: int) -> Collective:
    """The record as it was at `at_ns`, after the call."""
    if record.issued_ns > at_ns:
        began_ns = called_ns(record)
        call = replace(record.call, held_ns=0)
        return replace(record, phase=Phase.HELD, issued_ns=began_ns, call=call, done_ns=0)
    if not record.over or record.done_ns <= at_ns:
        return record
    return replace(record, phase=Phase.ISSUED, done_ns=0, call=replace(record.call, freed=False))


def _title(rows: Sequence[StepRow], pending: Ranks, what: str) -> str:
    if not pending:
        failed = sorted(rank for row in rows if row.state == "failed" for rank in row.ranks)
        end = f"ended: {name_ranks(failed)} failed" if failed else "finished on every rank"
        return f"{what} has {end}."
    if any(row.state == "paused" for row in rows):
        return "Ranks are paused before their next collective."
    return "No rank is paused; ranks that wait need other ranks."


def _next(paused: bool, pending: Ranks) -> str:
    if not pending:
        return ""
    if paused:
        return (
            "%ddp_step, or one rank alone: %ddp_step --ranks 0, or to the end: %ddp_step --to end"
        )
    return "%ddp_why"
