"""Rules about who is not there: dead, done, never asked, late."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_notebook.diagnosis import majority
from ddp_notebook.diagnosis.progress import evidence_of, where_busy, works
from ddp_notebook.diagnosis.setup import torch_errors
from ddp_notebook.model import (
    Activity,
    Case,
    Category,
    Finding,
    format_ranks,
)

# -- who is not there --------------------------------------------------------------------


def raised(case: Case) -> Iterator[Finding]:
    """A rank's own error, by what it says."""
    yield from torch_errors.all_but(case, Category.ENV_INVALID)


def dead_ranks(case: Case) -> Iterator[Finding]:
    """A process that ended while others wait for it."""
    for e in case.ranks:
        if e.activity is not Activity.DEAD:
            continue
        words = e.last_words.strip().splitlines()
        crashed = e.exit_code != 0
        yield Finding(
            Category.RANK_DIED if crashed else Category.EARLY_EXIT,
            (e.rank,),
            "the process ended"
            + (f" (exit code {e.exit_code})" if e.exit_code is not None else ""),
            _way_back(case, e.rank),
            case.waiting,
            tuple(words[-1:]),
        )


def _way_back(case: Case, rank: int) -> str:
    """What brings a dead rank back. Those that wait for it in a cell or a script, inside
    init_process_group, do not notice its end, and the new one can join only when they are out."""
    if any(e.rank in case.waiting and e.path for e in case.ranks):
        return "Free the others, which gives it a new process too: %ddp_abort"
    return f"Bring it back: %ddp_restart --ranks {rank}"


def stopped_ranks(case: Case) -> Iterator[Finding]:
    """A process that somebody has stopped, as Ctrl-Z does: it goes on when it is told to."""
    for e in case.ranks:
        if e.activity is Activity.SILENT and e.process == "stopped":
            yield Finding(
                Category.STRAGGLER,
                (e.rank,),
                f"{e.doing.partition(';')[0]} (SIGSTOP, or Ctrl-Z in its terminal)",
                "Let it go on: kill -CONT and its pid, in a shell. Or give it a new process: "
                "%ddp_abort",
                case.waiting,
                (e.doing,),
            )


def absent_ranks(case: Case) -> Iterator[Finding]:
    """A rank that is done, or was never asked to, and did not call init_process_group."""
    waiting = tuple(
        e for e in case.ranks if e.activity is Activity.WAITING and e.inside in majority.IN_SETUP
    )
    if not waiting:
        return
    host = case.store_host
    call = max(majority.call_number(e) for e in waiting)
    expected = max(e.arguments.world_size or case.world_size for e in waiting)
    idle = tuple(e for e in case.ranks if e.activity is Activity.IDLE)
    never = tuple(e.rank for e in idle if not e.entered and not e.left and not e.initialized)
    once = tuple(e.rank for e in idle if 0 < e.left < call)
    # A group may be of some of the processes: then the rest is not missing.
    enough = case.world_size - len(never) - len(once) >= expected
    for absent, what in (
        (never, "never called init_process_group"),
        (once, "is done, and did not call init_process_group again as the others did"),
    ):
        if absent and not enough:
            yield Finding(
                Category.MISSING_RANK,
                absent,
                what,
                "Call it on every rank: run the same code on all ranks (%%ddp without --ranks).",
                case.waiting,
                tuple(f"rank {rank} runs nothing" for rank in absent),
            )
    gone = next((e for e in case.ranks if e.rank == host and e.activity is Activity.IDLE), None)
    if gone is not None and gone.entered and any(e.inside == "store" for e in waiting):
        yield Finding(
            Category.STORE_GONE,
            (gone.rank,),
            "hosted the store and has left, while others still need it",
            "Let rank 0 wait for the others (dist.barrier()) before it ends.",
            case.waiting,
        )


def early_exits(case: Case) -> Iterator[Finding]:
    """A rank that had a group and is done, while others wait for it in a collective."""
    if not any(
        e.activity is Activity.WAITING and e.inside in ("collective", "ddp") for e in case.ranks
    ):
        return
    left = tuple(e.rank for e in case.ranks if e.activity is Activity.IDLE and e.left)
    if left:
        yield Finding(
            Category.EARLY_EXIT,
            left,
            "finished while others wait in a collective",
            "Every rank must take part in every collective: see where the others wait.",
            case.waiting,
        )


def polling_ranks(case: Case) -> Iterator[Finding]:
    """A rank that waits in a loop for a file that no rank that still runs will write."""
    pollers = tuple(e for e in case.ranks if e.activity is Activity.BUSY and e.polls_for)
    working = (Activity.BUSY, Activity.SILENT)  # also one that answers nobody may write it
    if not pollers or any(e.activity in working and not e.polls_for for e in case.ranks):
        return
    for e in pollers:
        yield Finding(
            Category.FILESYSTEM,
            (e.rank,),
            f"waits in a loop for {e.polls_for}, which no rank has written",
            "Write the file before the others are waited for, or use dist.barrier() instead.",
            case.waiting,
            (f"rank {e.rank} is at {e.doing}", f"{e.polls_for} does not exist"),
        )


# -- who will still come -----------------------------------------------------------------


def late_ranks(case: Case) -> Iterator[Finding]:
    """A rank that the others wait for and that is busy, or held by the user: not a hang."""
    if not case.waiting:
        return
    for e in case.ranks:
        if works(e):
            yield Finding(
                Category.STRAGGLER,
                (e.rank,),
                f"has not come yet: it is busy{where_busy(e)}",
                "Wait for it, or interrupt the cell.",
                case.waiting,
                evidence_of(e),
                passing=True,
            )
    held = case.where(Activity.HELD)
    if held:
        yield Finding(
            Category.STRAGGLER,
            held,
            "paused before a stage, until it is stepped on",
            f"%ddp_step --ranks {format_ranks(held)}",
            case.waiting,
            passing=True,
        )
