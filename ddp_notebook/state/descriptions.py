"""The state in words: what a rank does, how its process ended."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

from ddp_notebook.model import Ranks, RankState, Snapshot, Status, counted, format_ranks, name_ranks


def headline(snapshot: Snapshot, known: Mapping[int, str] = MappingProxyType({})) -> str:
    """The session in one line. `known` has the ranks' states in a word, where more is known."""
    if snapshot.ended:
        return f"Session ended: {snapshot.ended}"
    if not snapshot.ranks:
        return "No ranks. Start them: %ddp_init --world-size 4"
    count = counted(snapshot.world_size, "rank")
    if snapshot.loading is not None:
        return f"{count}, {snapshot.backend or 'no backend'}: torch is being loaded"
    words: dict[str, list[int]] = {}
    for state in sorted(snapshot.ranks, key=lambda state: list(Status).index(state.status)):
        word = known.get(state.rank) or state_word(state)
        words.setdefault(word, []).append(state.rank)
    parts = [
        word if len(ranks) == snapshot.world_size else f"{name_ranks(ranks)} {word}"
        for word, ranks in words.items()
    ]
    where = f" · {snapshot.init_method}" if snapshot.init_method else ""
    return f"{count}, {snapshot.backend or 'no backend'}{where}: {'; '.join(parts)}"


def loading_text(snapshot: Snapshot) -> str:
    """``Loading torch, once for all ranks: about 45 %, 12 s``; empty when it is loaded."""
    loading = snapshot.loading
    if loading is None:
        return ""
    seconds = max(0, snapshot.taken_ns - loading.since_ns) // 1_000_000_000
    share = f"about {loading.percent} %, " if loading.percent else ""
    return f"Loading torch, once for all ranks: {share}{seconds} s"


def state_word(state: RankState) -> str:
    """The state of a rank in a word."""
    if state.status is Status.READY and state.raised:
        return "refused" if state.refused else "raised"
    if state.restarting and state.status in (Status.DEAD, Status.STARTING):
        return "restarting"
    return state.status.value


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
            return "its new process starts" if state.restarting else "its process starts"
        case Status.SETTING_UP:
            return state.doing or state.detail
        case Status.PAUSED:
            return state.detail
        case Status.READY:
            return f"its last cell raised {state.raised}" if state.raised else ""
        case Status.RUNNING:
            return state.doing or _run(state)
        case Status.FAILED:
            return _failure(state)
        case Status.DEAD:
            return "its process is replaced" if state.restarting else _death(state)


def _run(state: RankState) -> str:
    return f"cell {state.cell}" if state.cell else "the benchmark"


def _failure(state: RankState) -> str:
    return f"{state.entering.value}: {state.cause}" if state.entering else state.cause


def _death(state: RankState) -> str:
    last = state.last_words.strip().splitlines()
    words = f" · last words: {last[-1].strip()}" if last else ""
    if state.exit_code is None:
        return f"its process is gone{words}"
    return f"{exit_text(state.exit_code)}{words}"


def notes(snapshot: Snapshot, told: Collection[int] = ()) -> tuple[str, ...]:
    """Choices that were made for the user, then remedies for what went wrong.

    `told` are dead ranks of which a finding says how they come back.
    """
    lines = list(snapshot.notes)
    for state in snapshot.ranks:
        if state.status is Status.FAILED and state.remedy:
            lines.append(f"Rank {state.rank}: {state.remedy}")
        if state.lost_events:
            lines.append(f"Rank {state.rank}: {state.lost_events} messages were lost.")
    lines.extend(_limits(snapshot))
    alone = not snapshot.with_status(Status.RUNNING) and set(_dead(snapshot)) <= set(told)
    if _dead(snapshot) and not snapshot.ended and not alone:
        lines.append(_how_to_restart(snapshot))
    return tuple(dict.fromkeys(lines))


def _limits(snapshot: Snapshot) -> Iterator[str]:
    for text in dict.fromkeys(text for state in snapshot.ranks for text in state.limits):
        limited = tuple(state.rank for state in snapshot.ranks if text in state.limits)
        yield f"{name_ranks(limited).capitalize()}: {text}"


def _dead(snapshot: Snapshot) -> Ranks:
    """The dead ranks that are not being restarted."""
    dead = snapshot.with_status(Status.DEAD)
    return tuple(rank for rank in dead if not snapshot.ranks[rank].restarting)


def _how_to_restart(snapshot: Snapshot) -> str:
    dead = _dead(snapshot)
    running = snapshot.with_status(Status.RUNNING)
    restart = f"%ddp_restart --ranks {format_ranks(dead)}"
    who = name_ranks(dead)
    if not running:
        every = len(dead) == len(snapshot.ranks)
        variables = "without their variables" if every else "the others keep their variables"
        return f"{who.capitalize()} can be brought back, {variables}: {restart}"
    them = "both" if len(dead) + len(running) == 2 else "all of them"
    return (
        f"{who.capitalize()} can be brought back when {name_ranks(running)} left the cell: "
        f"{restart}. If that waits for {who}, interrupt it and restart {them}: "
        f"%ddp_restart --ranks {format_ranks((*dead, *running))}"
    )
