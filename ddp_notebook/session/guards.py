"""What a verb needs before it may begin: ranks that exist, live and wait for work."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Mapping
from types import MappingProxyType

from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import Ranks, Snapshot, Status, format_ranks, name_ranks


def check_ranks(ranks: Ranks, snapshot: Snapshot) -> None:
    """Raises UsageMistake when one of `ranks` does not exist."""
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
    paused: Callable[[], Ranks] = tuple,
) -> Ranks:
    """The ranks a verb is for, all by default. `paused` gives those paused before a collective.

    `claimed` has the run that each claimed rank is in, or is about to begin.
    Raises UsageMistake when one of the ranks is dead or still in an earlier cell.
    """
    states = snapshot.ranks
    members = ranks if ranks is not None else tuple(range(len(states)))
    check_ranks(members, snapshot)
    dead = tuple(rank for rank in members if states[rank].status is Status.DEAD)
    live = tuple(rank for rank in members if rank not in dead)
    if dead:
        it, is_ = ("it", "is") if len(dead) == 1 else ("them", "are")
        without = f", or leave {it} out: {verb} --ranks {format_ranks(live)}" if live else ""
        raise UsageMistake(
            f"{name_ranks(dead).capitalize()} {is_} dead. Bring {it} back: "
            f"%ddp_restart --ranks {format_ranks(dead)}{without}"
        )
    busy = tuple(r for r in members if states[r].status is Status.RUNNING or r in claimed)
    if busy:
        it, is_ = ("it", "is") if len(busy) == 1 else ("them", "are")
        doing = next(iter(doings(busy, snapshot, claimed)))
        if standing := tuple(rank for rank in paused() if rank in busy):
            it = "it" if len(standing) == 1 else "them"
            raise UsageMistake(
                f"{name_ranks(standing).capitalize()} {'is' if it == 'it' else 'are'} still in an "
                f"earlier cell, paused before a collective ({doing}). Let {it} go on to the end: "
                "%ddp_step --to end. Or abort the cell: %ddp_abort"
            )
        raise UsageMistake(
            f"{name_ranks(busy).capitalize()} {is_} still in an earlier cell ({doing}). "
            f"Wait for it: %ddp_wait. Get {it} back: %ddp_abort, or with new processes: "
            f"%ddp_restart --ranks {format_ranks(busy)}"
        )
    inside = tuple(
        rank
        for rank in members
        if states[rank].status is Status.SETTING_UP and states[rank].entering is not None
    )
    if inside:
        is_ = "is" if len(inside) == 1 else "are"
        raise UsageMistake(
            f"{name_ranks(inside).capitalize()} {is_} still in set-up. Why: %ddp_why. "
            "Abort it: %ddp_abort. Begin again: %ddp_init"
        )
    return members


def doings(
    ranks: Ranks, snapshot: Snapshot, claimed: Mapping[int, str] = MappingProxyType({})
) -> Mapping[str, list[int]]:
    """What busy ranks do, and which of them."""
    by_doing: dict[str, list[int]] = {}
    for rank in ranks:
        state = snapshot.ranks[rank]
        cell = f"cell {state.cell}" if state.cell else "the benchmark"
        doing = state.doing or claimed.get(rank) or cell
        by_doing.setdefault(doing, []).append(rank)
    return by_doing


def check_name(name: str) -> None:
    """Raises UsageMistake when `name` cannot be a variable."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UsageMistake(f"{name!r} is not the name of a variable.")
