"""Where ranks stand, as step tables: at stages of setup, at collectives, at lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from types import MappingProxyType

from ddp_notebook.model import (
    Collective,
    Collectives,
    Frame,
    LineStopped,
    Part,
    Phase,
    Ranks,
    RankState,
    Snapshot,
    Stage,
    Status,
    StepRow,
    StepTable,
    VariableTable,
    by_value,
    counted,
    format_bytes,
    format_ranks,
    name_ranks,
)

_WAIT_FOR_ALL = (Stage.RENDEZVOUS, Stage.PROCESS_GROUP, Stage.VERIFIED)
"""Stages that a rank passes only together with the others."""
_STAGE_WORDS = {
    Status.PAUSED: "paused",
    Status.SETTING_UP: "waiting",
    Status.FAILED: "failed",
    Status.DEAD: "dead",
    Status.READY: "done",
}


def setup_table(snapshot: Snapshot, store: str = "session") -> StepTable:
    """The step table of setup. `store` is session or rank0."""
    paused = snapshot.with_status(Status.PAUSED)
    if len(snapshot.with_status(Status.READY)) == snapshot.world_size:
        title = "Setup is complete: every rank is verified."
    else:
        by_state = (
            f"{name_ranks(ranks)} {word}"
            for status, word in _STAGE_WORDS.items()
            if (ranks := snapshot.with_status(status))
        )
        title = f"Setup, step by step: {'; '.join(by_state)}"
    if paused:
        everyone = len(paused) == snapshot.world_size
        next_call = "%ddp_step" if everyone else f"%ddp_step --ranks {format_ranks(paused)}"
    else:
        stuck = snapshot.with_status(Status.FAILED, Status.SETTING_UP)
        next_call = "%ddp_why" if stuck else ""
    rows = tuple(_stage_row(state, snapshot, store) for state in snapshot.ranks)
    stage = stage_in_view(snapshot)
    about, link = (f"{stage.value}: {stage.about}", stage.link) if stage else ("", "")
    return StepTable(title, rows, about, link, next_call)


def waits_in_stage(state: RankState, snapshot: Snapshot, store: str) -> Ranks:
    """The ranks for which a rank in a stage waits."""
    stage = state.entering
    if state.status is not Status.SETTING_UP or stage is None:
        return ()
    if stage is Stage.STORE:
        host = snapshot.ranks[0]
        absent = store == "rank0" and state.rank != 0 and _reached(host) < Stage.STORE.number
        return (0,) if absent else ()
    if stage not in _WAIT_FOR_ALL:
        return ()
    return tuple(s.rank for s in snapshot.ranks if _arrived_at(s) < stage.number)


def _arrived_at(state: RankState) -> int:
    """The number of the stage this rank is in, or has passed."""
    inside = state.entering if state.status is Status.SETTING_UP else None
    return inside.number if inside else _reached(state)


def _reached(state: RankState) -> int:
    """The number of the last stage this rank has passed."""
    return state.stage.number if state.stage else 0


def _stage_row(state: RankState, snapshot: Snapshot, store: str) -> StepRow:
    text = state.doing or state.detail
    if state.status is Status.FAILED:
        text = f"{state.entering.value if state.entering else 'setup'}: {state.cause}"
    elif state.status is Status.SETTING_UP and state.entering:
        stage = state.entering.value
        text = ", ".join(filter(None, (f"in {stage}", text.removeprefix(f"{stage}: "))))
    since_s = (snapshot.taken_ns - state.since_ns) / 1e9 if state.since_ns else 0.0
    return StepRow(
        ranks=(state.rank,),
        passed=state.stage.value if state.stage else "",
        state=_STAGE_WORDS.get(state.status, state.status.value),
        text=text,
        waits_for=waits_in_stage(state, snapshot, store),
        since_s=max(0.0, since_s),
    )


def stage_in_view(snapshot: Snapshot) -> Stage | None:
    """The stage to explain: the one in which ranks are, or the next one."""
    inside = [s.entering for s in snapshot.ranks if s.status is Status.SETTING_UP and s.entering]
    if inside:
        return max(inside, key=lambda stage: stage.number)
    paused = [_reached(s) for s in snapshot.ranks if s.status is Status.PAUSED]
    return list(Stage)[min(paused)] if paused and min(paused) < len(Stage) else None


def stage_values(stage: Stage, snapshot: Snapshot) -> str:
    """What the ranks bring to a stage, or find there."""
    size, last = snapshot.world_size, snapshot.world_size - 1
    host, _, port = snapshot.init_method.partition("://")[2].rpartition(":")
    address = f" MASTER_ADDR={host} MASTER_PORT={port}" if host else ""
    return {
        Stage.ENVIRONMENT: f"RANK=0 … RANK={last}, WORLD_SIZE={size}{address}",
        Stage.STORE: f"TCPStore({host}, {port})" if host else snapshot.init_method,
        Stage.RENDEZVOUS: f"keys: join/0 … join/{last}",
        Stage.PROCESS_GROUP: f"backend={snapshot.backend}, world_size={size}",
        Stage.VERIFIED: f"each rank brings its number + 1: the sum is {size * (size + 1) // 2}",
    }.get(stage, "")


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


def collective_table(
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
        text = failures.get(rank, "")
        if text:
            state = "failed"
        elif rank not in pending:
            state = "done"
        elif record is not None and is_paused(record):
            state = "paused"
        else:
            state = "busy" if record is None or record.over else "waiting"
        row: _Row = ("0 collectives", state, text, (), 0.0)
        if record is not None:
            if rank in pending:
                text = describe_collective(record, collectives.of[rank])
            waits_for = missing.of(record) if state == "waiting" else ()
            limit_s = record.call.limit_s if state == "waiting" else 0.0
            passed = counted(record.number + (not is_paused(record)), "collective")
            row = (passed, state, text, waits_for, limit_s)
        ranks_of.setdefault(row, []).append(rank)
        if record is not None and now_ns and rank in pending:
            since[row] = max(since.get(row, 0.0), (now_ns - record.issued_ns) / 1e9)
    rows = tuple(
        StepRow(tuple(ranks), *row[:-1], since.get(row, 0.0), row[-1])
        for row, ranks in ranks_of.items()
    )
    if not pending:
        failed = sorted(rank for row in rows if row.state == "failed" for rank in row.ranks)
        end = f"ended: {name_ranks(failed)} failed" if failed else "finished on every rank"
        return StepTable(f"{what} has {end}.", rows)
    paused = next((row for row in rows if row.state == "paused"), None)
    if paused is None:
        title = "No rank is paused; the waiting ranks need other ranks."
        return StepTable(title, rows, next_call="%ddp_why")
    operation = latest[paused.ranks[0]].operation
    about = _ABOUT.get(operation, "")
    return StepTable(
        "Ranks are paused before their next collective.",
        rows,
        about,
        f"{_DOCUMENTED}{operation}" if about else "",
        "%ddp_step, or one rank alone: %ddp_step --ranks 0, or to the end: %ddp_step --to end",
    )


def is_paused(record: Collective) -> bool:
    """True when its rank is paused before it."""
    return record.phase is Phase.HELD


def describe_collective(record: Collective, before: Sequence[Collective] = ()) -> str:
    """``all_reduce of float32 [28] (112 B), DDP's backward, bucket 2 of 3, train.py, line 41``."""
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
            self._missing[key] = tuple(
                rank
                for rank in self._collectives.groups.get(record.group, ())
                if not any(
                    other.slot >= record.slot
                    and other.group == record.group
                    and not other.is_point_to_point
                    and not is_paused(other)
                    for other in reversed(self._collectives.of.get(rank, ()))
                )
            )
        return self._missing[key]


def of_run(records: Sequence[Collective], left_ns: Mapping[int, int]) -> tuple[Collective, ...]:
    """The records that a run's code issued. `left_ns`: when each rank has left the run.

    What no line of the user's issues after that is setup's: %ddp_abort builds a group and checks
    it, minutes later perhaps.
    """
    return tuple(
        record
        for record in records
        if record.path or record.issued_ns <= left_ns.get(record.rank, record.issued_ns)
    )


def collectives_at(collectives: Collectives, at_ns: int) -> Collectives:
    """The collectives called by `at_ns`, in the phase that they were in then."""
    of: dict[int, tuple[Collective, ...]] = {}
    for rank, records in collectives.of.items():
        then = []
        for record in records:
            began_ns, call = called_ns(record), record.call
            if began_ns > at_ns:
                continue
            if record.issued_ns > at_ns:  # its rank was paused before it
                call = replace(call, held_ns=0)
                record = replace(record, phase=Phase.HELD, issued_ns=began_ns, done_ns=0, call=call)
            elif record.over and record.done_ns > at_ns:
                call = replace(call, freed=False)
                record = replace(record, phase=Phase.ISSUED, done_ns=0, call=call)
            then.append(record)
        of[rank] = tuple(then)
    return replace(collectives, of=of)


def called_ns(record: Collective) -> int:
    """When the rank called it; it was issued later if the rank was paused."""
    return record.issued_ns - record.call.held_ns


_NEXT = (
    "%ddp_step (the next line), %ddp_step --into, --out, --to LINE; to the next breakpoint or the "
    "end: %ddp_step --to end"
)


@dataclass
class StoppedFile:
    """The lines of a cell or a file around those at which ranks are paused."""

    file: str
    lines: dict[int, str] = field(default_factory=dict)
    stops: dict[int, list[LineStopped]] = field(default_factory=dict)
    """By line, the ranks that are there, in their order."""

    def ranks_at(self, line: int) -> Ranks:
        """The ranks that are paused at this line."""
        return tuple(stop.rank for stop in self.stops.get(line, ()))


def line_table(stops: Mapping[int, LineStopped], others: StepTable) -> StepTable:
    """The table of `stops`, and of the ranks of `others` without one."""
    issued = {rank: row.passed for row in others.rows for rank in row.ranks}
    rows = []
    names = names_of(stop.file for stop in stops.values())
    at = {r: (s.file, s.line, s.function, s.why, s.thread) for r, s in stops.items()}
    for ranks, _ in by_value(at):
        for same, passed in by_value({rank: issued.get(rank, "") for rank in ranks}):
            stop = stops[same[0]]
            rows.append(StepRow(same, passed, "paused", stop_text(stop, names[stop.file])))
    for row in others.rows:
        left = tuple(rank for rank in row.ranks if rank not in stops)
        text = row.text
        if row.limit_s:  # a collective that was issued before the others paused may time out
            left_s = max(0.0, row.limit_s - row.since_s)
            ends_in = f"{left_s / 60:.0f} min" if left_s >= 120 else f"{left_s:.0f} s"
            limit = f"{row.limit_s / 60:g} min" if row.limit_s >= 120 else f"{row.limit_s:g} s"
            text += f"; its group's timeout ({limit}) ends it in {ends_in}"
        if left:
            rows.append(replace(row, ranks=left, text=text))
    # In the title the line of the most ranks comes first, and a file is named once.
    places = by_value({rank: (stop.file, stop.line) for rank, stop in stops.items()})
    parts, before = [], ""
    for ranks, (file, line) in sorted(places, key=lambda each: (-len(each[0]), each)):
        where = place(file, line, names[file])
        if file == before:
            where = f"line {line}"
        before = file
        parts.append(f"{name_ranks(ranks)} at {where}")
    title = f"Paused: {'; '.join(parts)}."
    return StepTable(title, tuple(rows), next_call=_NEXT, details=_source_around(stops))


def place(file: str, line: int, name: str = "") -> str:
    """``cell 3, line 4``; `name` is the file's where its own does not tell."""
    return f"{file if _is_cell(file) else name or PurePath(file).name}, line {line}"


def names_of(files: Iterable[str]) -> dict[str, str]:
    """A short name for each file: its own, with its folder's if two have the same."""
    own = {file: PurePath(file) for file in files}
    names = [path.name for path in own.values()]
    return {
        file: "/".join(path.parts[-2:]) if names.count(path.name) > 1 else path.name
        for file, path in own.items()
    }


def watched(name: str, table: VariableTable) -> str:
    """``loss: 0.5 (ranks 0, 2-3), nan (rank 1)``: a line of a step table."""
    rows = [row for section in table.sections for row in section.rows]
    values = [f"{cell.text} ({name_ranks(cell.ranks)})" for row in rows for cell in row.cells]
    values += [f"{name_ranks(unread.ranks)}: {unread.why}" for unread in table.unread]
    summary = next((f"; {row.summary}" for row in rows if row.summary), "")
    return f"{name}: {', '.join(values)}{summary}"


def frames_text(
    ranks: Ranks, frames: Sequence[Frame], chosen: int, why: str = ""
) -> tuple[str, ...]:
    """The frames of paused ranks, of which `frames` has the innermost first; `chosen` is marked.

    Shown as in a traceback and in a stack tree: the innermost, number 0, is the last.
    """
    if not frames:
        return (f"{name_ranks(ranks)}: {why}",)
    lines = [f"{name_ranks(ranks)}:"]
    for number, frame in reversed(tuple(enumerate(frames))):
        function = f", in {frame.function}" if frame.function not in ("", "<module>") else ""
        mark = "→" if number == chosen else " "
        lines.append(
            f"{mark} {number:>2}  {place(frame.file, frame.line)}{function}: {frame.source}"
        )
    return tuple(lines)


def _is_cell(file: str) -> bool:
    return file.startswith("cell ")


def stop_text(stop: LineStopped, name: str = "") -> str:
    """``cell 1, line 4, in f: a = i * 2 (breakpoint 1)``; `name` as of `place`."""
    where = place(stop.file, stop.line, name)
    if stop.function not in ("", "<module>"):
        where += f", in {stop.function}"
    if stop.thread:
        where += f", thread {stop.thread}"
    index = stop.line - stop.first
    line = stop.source[index].strip() if 0 <= index < len(stop.source) else ""
    why = f" ({stop.why})" if stop.why and stop.why not in line else ""
    return f"{where}: {line}{why}" if line else f"{where}{why}"


def stopped_files(stops: Mapping[int, LineStopped]) -> list[StoppedFile]:
    """The known lines around each stop, file by file."""
    files: dict[str, StoppedFile] = {}
    for _, stop in sorted(stops.items()):
        file = files.setdefault(stop.file, StoppedFile(stop.file))
        file.lines.update({stop.first + i: text for i, text in enumerate(stop.source)})
        file.stops.setdefault(stop.line, []).append(stop)
    return list(files.values())


def _source_around(stops: Mapping[int, LineStopped]) -> tuple[str, ...]:
    """The lines around each stop, and beside them which ranks are there."""
    files = stopped_files(stops)
    shown: list[str] = []
    for file in files:
        if len(files) > 1:
            shown.append(f"{file.file}:")
        width = len(str(max(file.lines, default=0)))
        longest = max((len(file.lines.get(line, "").rstrip()) for line in file.stops), default=0)
        last = 0
        for number, line in sorted(file.lines.items()):
            # The most lines missing between two pieces of source that are shown as one.
            if last and number - last > 2:
                shown.append(f"  {'…':>{width}}")
            last = number
            text = line.rstrip()
            if ranks := file.ranks_at(number):
                shown.append(f"→ {number:>{width}}  {text:<{longest}}   ← {name_ranks(ranks)}")
            else:
                shown.append(f"  {number:>{width}}  {text}".rstrip())
    return tuple(shown)
