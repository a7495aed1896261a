"""Preconditions of a verb: its ranks exist, are alive and are idle."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Mapping
from types import MappingProxyType

from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import (
    Ranks,
    Snapshot,
    Status,
    are,
    by_value,
    format_ranks,
    name_ranks,
    them,
)
from ddp_notebook.views.board_rows import no_group


def existing(ranks: Ranks | None, snapshot: Snapshot) -> Ranks:
    """Return the ranks a verb is about, all by default. Raises UsageMistake."""
    members = ranks if ranks is not None else tuple(range(snapshot.world_size))
    check_ranks(members, snapshot)
    return members


def living(members: Ranks, snapshot: Snapshot) -> Ranks:
    """Return those of `members` that have a process."""
    return tuple(rank for rank in members if snapshot.ranks[rank].status is not Status.DEAD)


def check_ranks(ranks: Ranks, snapshot: Snapshot) -> None:
    """Raise UsageMistake when one of `ranks` does not exist."""
    world_size = snapshot.world_size
    for rank in ranks:
        if not 0 <= rank < world_size:
            raise UsageMistake(
                f"Rank {rank} does not exist: world size is {world_size}, so ranks are "
                f"0 to {world_size - 1}."
            )


def idle_ranks(
    ranks: Ranks | None,
    verb: str,
    snapshot: Snapshot,
    claimed: Mapping[int, str] = MappingProxyType({}),
    paused: Callable[[], Mapping[int, str]] = dict,
) -> Ranks:
    """Return the ranks a verb acts on, all by default.

    `paused` gives those that are paused, and before what: a line, a collective. `claimed` maps
    each claimed rank to the run that it is in or is about to begin. Raises
    UsageMistake when one of the ranks is dead or still in an earlier cell.
    """
    members = existing(ranks, snapshot)
    check_alive(members, verb, snapshot)
    busy = {s.rank for s in snapshot.ranks if s.status is Status.RUNNING} | claimed.keys()
    if busy := busy.intersection(members):
        _, doing = doings(tuple(sorted(busy)), snapshot, claimed)[0]
        if before := {rank: what for rank, what in paused().items() if rank in busy}:
            doing = claimed.get(min(before)) or doing  # not "paused at", which is said anyway
            raise UsageMistake(
                f"{name_ranks(before).capitalize()} {are(before)} still in an earlier cell, paused "
                f"before {next(iter(before.values()))} ({doing}). Let {them(before)} continue "
                "to the end: %ddp_step --to end. Or abort the cell: %ddp_abort"
            )
        raise UsageMistake(
            f"{name_ranks(busy).capitalize()} {are(busy)} still in an earlier cell ({doing}). "
            f"Why: %ddp_why. Wait for it: %ddp_wait. Free {them(busy)}: %ddp_abort, or with "
            f"new processes: %ddp_restart --ranks {format_ranks(busy)}"
        )
    in_set_up = {
        s.rank for s in snapshot.ranks if s.status is Status.SETTING_UP and s.entering is not None
    }
    if in_set_up := in_set_up.intersection(members):
        raise UsageMistake(
            f"{name_ranks(in_set_up).capitalize()} {are(in_set_up)} still in setup. "
            "Why: %ddp_why. Abort it: %ddp_abort. Begin again: %ddp_init"
        )
    return members


def check_alive(members: Ranks, verb: str, snapshot: Snapshot) -> None:
    """Raise UsageMistake when one of `members` is dead."""
    dead = {s.rank for s in snapshot.ranks if s.status is Status.DEAD}.intersection(members)
    if not dead:
        return
    live = living(members, snapshot)
    without = f", or leave {them(dead)} out: {verb} --ranks {format_ranks(live)}" if live else ""
    raise UsageMistake(
        f"{name_ranks(dead).capitalize()} {are(dead)} dead. Bring {them(dead)} back: "
        f"%ddp_restart --ranks {format_ranks(dead)}{without}"
    )


def check_group(snapshot: Snapshot) -> None:
    """Raise UsageMistake when ranks have destroyed the group that a verb needs."""
    if snapshot.groupless:
        raise UsageMistake(no_group(snapshot.groupless))


def doings(
    ranks: Ranks, snapshot: Snapshot, claimed: Mapping[int, str] = MappingProxyType({})
) -> list[tuple[Ranks, str]]:
    """Group busy ranks that do the same; return what each group does."""

    def doing(rank: int) -> str:
        state = snapshot.ranks[rank]
        cell = f"cell {state.cell}" if state.cell else "the benchmark"
        return state.doing or claimed.get(rank) or cell

    return by_value({rank: doing(rank) for rank in ranks})


CODE_FROM_SET_UP = ("torch", "dist", "DDP")
FROM_SET_UP = ("rank", "world_size", "device", *CODE_FROM_SET_UP)
"""The names that a rank's setup gives to its cells."""


def check_sendable(name: str) -> None:
    """Raise UsageMistake when no variable `name` of the notebook can be set on ranks."""
    check_name(name)
    if name in FROM_SET_UP:
        raise UsageMistake(
            f"{name} is set by each rank's own setup, and the notebook's value would be wrong in "
            f"cells. Send it under another name: my_{name} = {name}, then %ddp_push my_{name}"
        )


def check_name(name: str) -> None:
    """Raise UsageMistake when `name` cannot be a variable."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UsageMistake(f"{name!r} is not the name of a variable.")
