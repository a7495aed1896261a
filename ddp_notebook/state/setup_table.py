"""Which stage of set-up each rank is in, and who waits for whom."""

from __future__ import annotations

from ddp_notebook.model import (
    Ranks,
    RankState,
    Snapshot,
    Stage,
    Status,
    StepRow,
    StepTable,
    format_ranks,
    name_ranks,
)

_WAIT_FOR_ALL = (Stage.RENDEZVOUS, Stage.PROCESS_GROUP, Stage.VERIFIED)
"""Stages that a rank passes only together with the others."""


def step_table(snapshot: Snapshot, store: str = "session") -> StepTable:
    """The step table of set-up. `store` is session or rank0."""
    rows = tuple(_row(state, snapshot, store) for state in snapshot.ranks)
    entering = _stage_in_view(snapshot)
    return StepTable(
        title=_title(snapshot),
        rows=rows,
        about=f"{entering.value}: {entering.about}" if entering else "",
        link=entering.link if entering else "",
        next_call=_next_call(snapshot),
    )


def waits_for(state: RankState, snapshot: Snapshot, store: str) -> Ranks:
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


def _reached(state: RankState) -> int:
    """The number of the last stage this rank has passed."""
    return state.stage.number if state.stage else 0


def _arrived_at(state: RankState) -> int:
    """The number of the stage this rank is in, or has passed."""
    inside = state.status is Status.SETTING_UP and state.entering is not None
    return state.entering.number if inside and state.entering else _reached(state)


def _row(state: RankState, snapshot: Snapshot, store: str) -> StepRow:
    words = {
        Status.SETTING_UP: "waiting",
        Status.PAUSED: "paused",
        Status.FAILED: "failed",
        Status.DEAD: "dead",
        Status.READY: "done",
    }
    text = state.doing or state.detail
    if state.status is Status.FAILED:
        text = f"{state.entering.value if state.entering else 'set-up'}: {state.cause}"
    elif state.status is Status.SETTING_UP and state.entering:
        stage = state.entering.value
        text = ", ".join(filter(None, (f"in {stage}", text.removeprefix(f"{stage}: "))))
    since_s = (snapshot.taken_ns - state.since_ns) / 1e9 if state.since_ns else 0.0
    return StepRow(
        ranks=(state.rank,),
        passed=state.stage.value if state.stage else "",
        state=words.get(state.status, state.status.value),
        text=text,
        waits_for=waits_for(state, snapshot, store),
        since_s=max(0.0, since_s),
    )


def _stage_in_view(snapshot: Snapshot) -> Stage | None:
    """The stage to explain: the one in which ranks are, or the next one."""
    inside = [s.entering for s in snapshot.ranks if s.status is Status.SETTING_UP and s.entering]
    if inside:
        return max(inside, key=lambda stage: stage.number)
    paused = [_reached(s) for s in snapshot.ranks if s.status is Status.PAUSED]
    return list(Stage)[min(paused)] if paused and min(paused) < len(Stage) else None


def _title(snapshot: Snapshot) -> str:
    counts = {status: snapshot.with_status(status) for status in Status}
    if len(counts[Status.READY]) == snapshot.world_size:
        return "Set-up is complete: every rank is verified."
    parts = []
    for status, words in (
        (Status.PAUSED, "paused"),
        (Status.SETTING_UP, "waiting"),
        (Status.FAILED, "failed"),
        (Status.DEAD, "dead"),
        (Status.READY, "done"),
    ):
        if counts[status]:
            parts.append(f"{name_ranks(counts[status])} {words}")
    return f"Set-up, step by step: {'; '.join(parts)}"


def _next_call(snapshot: Snapshot) -> str:
    paused = snapshot.with_status(Status.PAUSED)
    if not paused:
        return "%ddp_why" if snapshot.with_status(Status.FAILED, Status.SETTING_UP) else ""
    everyone = len(paused) == snapshot.world_size
    return "%ddp_step" if everyone else f"%ddp_step --ranks {format_ranks(paused)}"
