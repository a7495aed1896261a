"""What set-up says of ranks that run already, were replaced, or could not be started."""

from __future__ import annotations

from collections.abc import Collection

from ddp_notebook.model import Ranks, Snapshot, Status, agree, are, format_ranks, name_ranks, verb
from ddp_notebook.session.options import InitOptions


def running_already(options: InitOptions, known: Snapshot) -> str:
    """That `%ddp_init` has nothing to start, and how to have what `options` ask for."""
    size, busy = known.world_size, known.with_status(Status.RUNNING)
    other = ""
    if options.world_size != size:
        other = (
            ". Another number of ranks, of which those that stay keep their variables: "
            f"%ddp_init --world-size {options.world_size} --replace"
        )
    if dead := known.with_status(Status.DEAD):
        back = f"%ddp_restart --ranks {format_ranks(dead)}"
        return f"{name_ranks(dead).capitalize()} {are(dead)} dead. To bring back: {back}{other}"
    where = f", and {name_ranks(busy)} still in a cell (to free: %ddp_abort)" if busy else ""
    return f"{size} ranks are running already{where}. Fresh ranks: %ddp_restart{other}"


def kept(kept: Collection[int], gone: Collection[int], world_size: int) -> str:
    """Which ranks were kept when some were replaced, and what happened to the others."""
    ended = tuple(sorted(rank for rank in gone if rank >= world_size))
    new = tuple(rank for rank in range(world_size) if rank not in kept)
    parts = []
    if kept:
        their = agree(kept, "its variables", "their variables")
        parts.append(f"{name_ranks(tuple(sorted(kept)))} stayed, with {their}")
    if ended:
        parts.append(f"{verb(ended, 'has', 'have')} ended")
    if new:
        parts.append(f"{verb(new, 'is', 'are')} new")
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}. Fresh processes for all: %ddp_restart"


def why_not_restarted(stopped: Ranks, busy: Ranks, dead: Ranks) -> str:
    """That ranks were ended without new ones: a group needs every rank, and some are missing.

    Those in a cell, else the dead.
    """
    missing = busy or dead
    where = "still in a cell" if busy else "dead"
    free = "Free them with their variables: %ddp_abort. Or restart" if busy else "Restart"
    ended = verb(
        stopped, "was ended and has no new process", "were ended and have no new processes"
    )
    return (
        f"{ended[:1].upper()}{ended[1:]} yet. "
        f"The group needs every rank, and {name_ranks(missing)} {are(missing)} {where}. "
        f"{free} them together: %ddp_restart --ranks {format_ranks((*stopped, *busy, *dead))}"
    )


def freed(paused: Ranks) -> str:
    """What a restart of other ranks did to those that were paused."""
    their = agree(paused, "its cell was aborted, its variables stay", "their variables stay")
    if len(paused) > 1:
        their = f"their cell was aborted, {their}"
    return f"{verb(paused, 'was', 'were').capitalize()} paused: {their}."


def not_unblocked(ranks: Ranks) -> str:
    """That `ranks` have new processes because nothing else could unblock them."""
    who = name_ranks(ranks).capitalize()
    if len(ranks) == 1:
        return f"{who} could not be unblocked. Its process was replaced; its variables are lost."
    return f"{who} could not be unblocked. Their processes were replaced; their variables are lost."
