"""State, collectives and findings as lanes: who is where, who waits for whom, whose doing it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ddp_notebook.model import (
    Collective,
    Collectives,
    Diagnosis,
    Lane,
    Phase,
    Place,
    Ranks,
    RankState,
    Role,
    Snapshot,
    Standing,
    Status,
)
from ddp_notebook.state import collective_table, setup_table
from ddp_notebook.state.board import FOLD_FROM, SILENT_AFTER_S, describe

_AROUND = 2
"""Lines of code that are shown before and after the one."""
_STANDINGS = 12
"""Places that are shown; those of the most ranks come first."""
_CALLERS = 4


@dataclass(frozen=True)
class Picture:
    """What is known at one moment.

    `collectives` is what the ranks issued in the run that goes on, or was the last one; `pending`
    are the ranks that are in it. `store` says who hosts the store: session or rank0.
    """

    snapshot: Snapshot
    collectives: Collectives = field(default_factory=Collectives)
    pending: Ranks = ()
    diagnosis: Diagnosis | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    store: str = "session"


def lanes(picture: Picture) -> tuple[Lane, ...]:
    """The ranks in their order; from eight on those in the same state share a lane."""
    fold = picture.snapshot.world_size >= FOLD_FROM
    latest = {rank: issued[-1] for rank, issued in picture.collectives.of.items() if issued}
    pending = set(picture.pending)
    awaited = collective_table.Awaited(picture.collectives)
    folded: dict[object, Lane] = {}
    for state in picture.snapshot.ranks:
        record = latest.get(state.rank) if state.rank in pending else None
        lane = _lane(state, record, awaited, picture)
        key = _sameness(lane) if fold else state.rank
        there = folded.get(key)
        folded[key] = lane if there is None else _together(there, lane)
    return tuple(folded.values())


def _sameness(lane: Lane) -> object:
    silent = lane.heard_ns != 0
    return (lane.role, lane.status, lane.stage, lane.entering, lane.text, lane.waits_for, silent)


def _together(one: Lane, other: Lane) -> Lane:
    """One lane for both: as long at it as the first to come, as silent as the quietest."""
    since = [ns for ns in (one.since_ns, other.since_ns) if ns]
    heard = [ns for ns in (one.heard_ns, other.heard_ns) if ns]
    return replace(
        one,
        ranks=(*one.ranks, *other.ranks),
        since_ns=min(since, default=0),
        heard_ns=min(heard, default=0),
        where=one.where if one.where == other.where else "",
    )


def _lane(
    state: RankState,
    record: Collective | None,
    awaited: collective_table.Awaited,
    picture: Picture,
) -> Lane:
    now_ns = picture.snapshot.taken_ns
    quiet = state.heard_ns and now_ns - state.heard_ns > SILENT_AFTER_S * 1e9
    heard_ns = state.heard_ns if quiet and state.status is not Status.DEAD else 0
    text, since_ns, held = describe(state), state.since_ns, state.status is Status.PAUSED
    waits_for: Ranks = ()
    if state.status is Status.SETTING_UP:
        waits_for = setup_table.awaited(state, picture.snapshot, picture.store)
    elif state.status is Status.RUNNING:
        since_ns = 0
        if record is not None and not record.over:
            text = collective_table.describe(record, picture.collectives.of[state.rank])
            since_ns, held = record.issued_ns, collective_table.is_held(record)
            if not held:
                waits_for = awaited.by(record)
    elif state.status is Status.READY:
        since_ns = 0
    inside = record is not None and not record.over and not held
    waits = inside or bool(waits_for)
    place = (state.device, f"pid {state.pid}" if state.pid else "", state.host)
    return Lane(
        ranks=(state.rank,),
        role=_role(state, held, waits, heard_ns, picture.diagnosis),
        status=state.status,
        stage=state.stage,
        entering=state.entering,
        text=text,
        waits_for=waits_for,
        since_ns=since_ns,
        heard_ns=heard_ns,
        where=" · ".join(part for part in place if part),
    )


def _role(
    state: RankState, held: bool, waits: bool, heard_ns: int, diagnosis: Diagnosis | None
) -> Role:
    """The first that is true of the rank, the worst before the others."""
    for finding in diagnosis.findings if diagnosis is not None else ():
        if state.rank in finding.ranks:
            if not finding.passing:
                return Role.CULPRIT
            return Role.HELD if held else Role.LATE
    if state.status in (Status.DEAD, Status.FAILED):
        return Role.DEAD if state.status is Status.DEAD else Role.FAILED
    if heard_ns:
        return Role.SILENT
    if held:
        return Role.HELD
    if diagnosis is not None and any(state.rank in f.waiting for f in diagnosis.findings):
        return Role.VICTIM
    if waits:
        return Role.WAITING
    return Role.READY if state.status is Status.READY else Role.BUSY


def standings(picture: Picture) -> tuple[Standing, ...]:
    """The lines at which ranks of the run stand, those of the most ranks first."""
    of: dict[tuple[Place, ...], list[int]] = {}
    for rank in picture.pending:
        issued = picture.collectives.of.get(rank)
        if issued and issued[-1].path and not issued[-1].over:
            of.setdefault(issued[-1].path, []).append(rank)
    return standing_at(
        {rank: path for path, ranks in of.items() for rank in ranks}, picture.sources
    )


def standing_at(
    paths: Mapping[int, Sequence[Place]], sources: Mapping[str, str]
) -> tuple[Standing, ...]:
    """The same for ranks of which it is known where they stand, the innermost line last."""
    of: dict[tuple[Place, ...], list[int]] = {}
    for rank, path in sorted(paths.items()):
        of.setdefault(tuple(path), []).append(rank)
    made = [_standing(tuple(ranks), path, sources) for path, ranks in of.items()]
    return tuple(sorted(made, key=lambda each: -len(each.ranks))[:_STANDINGS])


def _standing(ranks: Ranks, path: Sequence[Place], sources: Mapping[str, str]) -> Standing:
    place = path[-1]
    source = sources.get(place.file, "").splitlines()
    lines: tuple[tuple[int, str], ...] = ()
    if 0 < place.line <= len(source):
        first, last = max(1, place.line - _AROUND), min(len(source), place.line + _AROUND)
        lines = tuple((number, source[number - 1]) for number in range(first, last + 1))
    elif place.text:
        lines = ((place.line, place.text),)
    return Standing(ranks, str(place), tuple(map(str, path[:-1][-_CALLERS:])), lines, place.line)


def as_of(collectives: Collectives, at_ns: int) -> Collectives:
    """What had been issued at `at_ns`, as far as it was then."""
    of = {
        rank: tuple(
            each if not each.over or each.done_ns <= at_ns else replace(each, phase=Phase.ISSUED)
            for each in issued
            if each.issued_ns <= at_ns
        )
        for rank, issued in collectives.of.items()
    }
    return replace(collectives, of=of)
