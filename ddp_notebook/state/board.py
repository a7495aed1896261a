"""State arranged for drawing: one row per rank, or per set of ranks in the same state."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from ddp_notebook.model import (
    Board,
    BoardRow,
    Ranks,
    RankState,
    Snapshot,
    Stage,
    Status,
    format_ranks,
    name_ranks,
)

FOLD_FROM = 8
"""With this many ranks and more, ranks in the same state share a row."""
SILENT_AFTER_S = 2.0
"""A live rank says something every quarter of a second."""


def board(snapshot: Snapshot) -> Board:
    """The board of `snapshot`, as old as the snapshot is."""
    rows = _rows(snapshot)
    return Board(headline=headline(snapshot), rows=rows, notes=_notes(snapshot), snapshot=snapshot)


def headline(snapshot: Snapshot) -> str:
    """The session in one line."""
    if snapshot.ended:
        return f"Session ended: {snapshot.ended}"
    if not snapshot.ranks:
        return "No ranks. Start them: %ddp_init --world-size 4"
    count = f"{snapshot.world_size} rank{'s' if snapshot.world_size > 1 else ''}"
    parts = []
    for status in Status:
        ranks = snapshot.with_status(status)
        if ranks:
            everyone = len(ranks) == snapshot.world_size
            parts.append(status.value if everyone else f"{name_ranks(ranks)} {status.value}")
    where = f" · {snapshot.init_method}" if snapshot.init_method else ""
    return f"{count}, {snapshot.backend or 'no backend'}{where}: {'; '.join(parts)}"


def exit_text(exit_code: int) -> str:
    """How a process ended: ``killed by SIGKILL``, ``exited with code 3``."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def describe(state: RankState) -> str:
    """What a rank does, waits for, raised last or died of, in a few words."""
    match state.status:
        case Status.STARTING:
            return "its process starts"
        case Status.SETTING_UP:
            return state.doing or state.detail
        case Status.PAUSED:
            return state.detail
        case Status.READY:
            return f"its last cell raised {state.raised}" if state.raised else ""
        case Status.RUNNING:
            return state.doing or (f"cell {state.cell}" if state.cell else "the benchmark")
        case Status.FAILED:
            stage = f"{state.entering.value}: " if state.entering else ""
            return f"{stage}{state.cause}"
        case Status.DEAD:
            last = state.last_words.strip().splitlines()
            said = f" · last words: {last[-1].strip()}" if last else ""
            return f"{exit_text(state.exit_code or 0)}{said}"


def _rows(snapshot: Snapshot) -> tuple[BoardRow, ...]:
    groups: list[list[RankState]] = []
    places: dict[object, int] = {}
    fold = snapshot.world_size >= FOLD_FROM
    for state in snapshot.ranks:
        key = _sameness(state, snapshot.taken_ns) if fold else state.rank
        if key not in places:
            places[key] = len(groups)
            groups.append([])
        groups[places[key]].append(state)
    return tuple(_row(group, snapshot.taken_ns) for group in groups)


def _sameness(state: RankState, now_ns: int) -> object:
    return (
        state.status,
        state.stage,
        state.entering,
        describe(state),
        _kind_of_device(state.device),
        state.host,
        _age_s(state, now_ns) > SILENT_AFTER_S,
    )


def _row(group: Sequence[RankState], now_ns: int) -> BoardRow:
    first = group[0]
    age_s = max(_age_s(state, now_ns) for state in group)
    one = len(group) == 1
    ranks: Ranks = tuple(state.rank for state in group)
    return BoardRow(
        ranks=ranks,
        status=first.status,
        stage=first.stage if first.stage is not None else None,
        entering=first.entering,
        text=describe(first),
        device=first.device if one else _kind_of_device(first.device),
        pid=first.pid if one else 0,
        host=first.host,
        age_s=age_s,
        silent=age_s > SILENT_AFTER_S and first.status is not Status.DEAD,
    )


def _kind_of_device(device: str) -> str:
    return device.partition(":")[0].partition(" ")[0]


def _age_s(state: RankState, now_ns: int) -> float:
    return max(0.0, (now_ns - state.heard_ns) / 1e9) if state.heard_ns else 0.0


def _notes(snapshot: Snapshot) -> tuple[str, ...]:
    notes = list(snapshot.notes)
    for state in snapshot.ranks:
        if state.status is Status.FAILED and state.remedy:
            notes.append(f"Rank {state.rank}: {state.remedy}")
        if state.lost_events:
            notes.append(f"Rank {state.rank}: {state.lost_events} messages were lost.")
    if not snapshot.ended:
        notes += _what_to_restart(snapshot)
    return tuple(dict.fromkeys(notes))


def _what_to_restart(snapshot: Snapshot) -> list[str]:
    dead = snapshot.with_status(Status.DEAD)
    if not dead:
        return []
    restart = f"%ddp_restart --ranks {format_ranks(dead)}"
    running = snapshot.with_status(Status.RUNNING)
    if not running:
        return [
            f"{name_ranks(dead).capitalize()} can be brought back, the others keep their "
            f"variables: {restart}"
        ]
    them = "both" if len(dead) + len(running) == 2 else "all of them"
    return [
        f"{name_ranks(dead).capitalize()} can be brought back when {name_ranks(running)} left "
        f"the cell: {restart}. If that waits for {name_ranks(dead)}, interrupt it and restart "
        f"{them}: %ddp_restart --ranks {format_ranks((*dead, *running))}"
    ]


def stages_passed(state: RankState) -> tuple[Stage, ...]:
    """The stages a rank has behind it."""
    if state.stage is None:
        return ()
    return tuple(stage for stage in Stage if stage.number <= state.stage.number)
