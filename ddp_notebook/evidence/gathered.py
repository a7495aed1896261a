"""Joins dumps and logs into one case, with the evidence for each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddp_notebook.errors import UsageMistake
from ddp_notebook.evidence import flight_recorder, folder, logs, nccl
from ddp_notebook.evidence.connects import Connects
from ddp_notebook.evidence.flight_recorder import Dump
from ddp_notebook.evidence.frames import Sources
from ddp_notebook.evidence.logs import Logs, Raised
from ddp_notebook.evidence.nccl import Watched
from ddp_notebook.model import (
    Activity,
    Case,
    Collective,
    Collectives,
    InitArguments,
    Phase,
    Place,
    RankReport,
    Ranks,
    at_place,
)

_ENDED_BY_OTHERS = (-15, -2)
"""SIGTERM and SIGINT: a launcher, a scheduler or a person ended it."""
_MOST_RANKS = 4096


@dataclass(frozen=True)
class Gathered:
    """A case out of files. `dumps` and `logs` are the ranks of which there are such.

    `stacks` is true where dumps say at which lines collectives were issued: only then ranks'
    collectives can be told apart by more than their shapes. `unread` says what was left out.
    """

    case: Case
    dumps: Ranks
    logs: Ranks
    stacks: bool
    unread: tuple[str, ...] = ()
    connects: Connects = field(default_factory=Connects)
    parted: str = ""
    """Which collective NCCL's watchdogs gave up on, and who had not issued it; or what else is
    certain of logs that name no rank. Empty for none."""


def gather(paths: Sequence[Path]) -> Gathered:
    """Read the files and folders at `paths`. Raises UsageMistake if nothing is there."""
    found = folder.read(paths)
    written = logs.read((text, rank) for _, text, rank in found.logs)
    sources = Sources(found.newest_s)
    dumps = {r: flight_recorder.read(wire, r, sources) for r, (_, wire) in found.dumps.items()}
    if written.two_jobs:
        raise UsageMistake(
            f"These files are of more than one job: in their logs {written.two_jobs}. Name the "
            "files of one job."
        )
    size = _size(dumps, written, found.notes)
    errors = {rank: _error(error, sources) for rank, error in written.raised.items()}
    watched = written.watchdogs.joined()
    gave_up = {rank: nccl.gave_up(of) for rank, of in watched.items()}
    late = {rank: each for rank, each in gave_up.items() if each is not None}
    errors = {**{rank: _timed_out(e, sources) for rank, (_, e) in late.items()}, **errors}
    records = {rank: _failed(dump.records, errors.get(rank)) for rank, dump in dumps.items()}
    reports = tuple(
        _report(rank, records.get(rank, ()), errors.get(rank), written) for rank in range(size)
    )
    return Gathered(
        Case(reports, collectives=_joined(dumps, records), sources=sources.texts),
        tuple(sorted(dumps)),
        tuple(sorted(written.ranks)),
        all(dump.stacks for dump in dumps.values() if dump.records),
        tuple(found.notes),
        written.connects,
        nccl.parted(watched) or _unclear(written),
    )


def _size(dumps: Mapping[int, Dump], written: Logs, notes: Sequence[str]) -> int:
    """How many ranks there are, as far as files tell. Raises UsageMistake where they tell nothing.

    Of torchrun's log alone that may be none.
    """
    sizes = [written.connects.size, *(dump.world_size for dump in dumps.values())]
    size = max([*sizes, *(rank + 1 for rank in (*dumps, *written.ranks))])
    if not size and not written.closed:
        raise UsageMistake(
            "Nothing of a job is there: no dump of torch's flight recorder, no log that names "
            "its rank, no saved run." + "".join(f"\n  {note}" for note in notes[:5])
        )
    if size > _MOST_RANKS:
        raise UsageMistake(f"It is of {size:,} ranks: at most {_MOST_RANKS:,} are read.")
    return size


def _unclear(written: Logs) -> str:
    """Facts from logs that do not name their ranks."""
    if written.watchdogs.timed_out and not written.watchdogs.joined():
        return "NCCL's watchdogs timed out, and the log does not tell in which of several groups"
    if written.unclaimed:
        errors = "; ".join(map(_first_line, written.unclaimed[:4]))
        return f"the log does not tell which ranks raised {errors}"
    if written.closed and not written.ranks:
        return (
            f"torchrun ended {len(written.closed)} processes that still ran, and no rank wrote "
            "what it did"
        )
    return ""


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _timed_out(late: Watched, sources: Sources) -> RankReport:
    """What NCCL's watchdog ended a process for, in the fields of a report."""
    return RankReport(
        0,
        Activity.FAILED,
        error_type="DistBackendError",
        error_text=f"NCCL's watchdog timed out in {late.words}",
        error_at=sources.path(late.frames),
    )


def _joined(
    dumps: Mapping[int, Dump], records: Mapping[int, tuple[Collective, ...]]
) -> Collectives:
    """The ranks' records, and those groups whose members a dump knows."""
    groups: dict[str, Ranks] = {}
    for _, dump in sorted(dumps.items()):
        for name, members in dump.groups.items():
            groups.setdefault(name, members)
    return Collectives(
        dict(sorted(records.items())),
        groups,
        {rank: of[0].number for rank, of in records.items() if of and of[0].number},
    )


def _error(raised: Raised, sources: Sources) -> RankReport:
    """What a rank raised, in the fields of a report."""
    places = []
    for frame, text in zip(raised.frames, raised.texts, strict=True):
        if frame.users:
            (place,) = sources.path((frame,))
            places.append(replace(place, text=place.text or text))
    return RankReport(
        0,
        Activity.FAILED,
        error_type=raised.type,
        error_text=raised.text,
        error_at=tuple(places),
    )


def _failed(records: tuple[Collective, ...], error: RankReport | None) -> tuple[Collective, ...]:
    """The records, where the last one raised the error as failed: gloo's say that they are done."""
    if not records or error is None or not error.error_at:
        return records
    last = records[-1]
    if last.place is None or (last.place.file, last.place.line) != _line(error.error_at[-1]):
        return records
    return (*records[:-1], replace(last, phase=Phase.FAILED))


def _line(place: Place) -> tuple[str, int]:
    return place.file, place.line


def _report(
    rank: int, records: tuple[Collective, ...], error: RankReport | None, written: Logs
) -> RankReport:
    """One rank: its error, else how its process ended, else what it was in."""
    had_group = bool(records)
    known = RankReport(
        rank,
        entered=int(had_group),
        left=int(had_group),
        initialized=had_group,
        arguments=InitArguments(rank=rank) if had_group else InitArguments(),
        last_words=written.last_words.get(rank, ""),
    )
    if error is not None:
        own = {name: getattr(error, name) for name in ("error_type", "error_text", "error_at")}
        return replace(known, activity=Activity.FAILED, path=error.error_at, **own)
    code = written.exits.get(rank)
    alive = rank in written.ended_by_agent or code in _ENDED_BY_OTHERS
    if code == 0:
        # What it issued after its dump is not known: so it is not known either what it lacks.
        return replace(known, exit_code=0, doing="its process ended without an error")
    # How a process ends that the launcher ends says nothing of it: others were gone before.
    if code is not None and not alive:
        return replace(known, activity=Activity.DEAD, exit_code=code)
    pending = next((record for record in records if not record.over), None)
    if pending is not None:
        return replace(known, activity=Activity.WAITING, inside="collective", path=pending.path)
    return replace(known, activity=Activity.SILENT, doing=_unknown(records, alive=alive))


def _unknown(records: tuple[Collective, ...], *, alive: bool) -> str:
    """What is known of a rank that is in no collective."""
    ran = "it still ran when torchrun ended it" if alive else "what it did then is not recorded"
    if not records:
        return ran
    last = records[-1]
    place = at_place(last.place)
    return f"{ran}; collective {last.slot}, {last.operation}{place}, was its last, and is done"
