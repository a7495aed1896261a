"""The rule for ranks that wait for a batch of a stuck DataLoader worker."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.progress import stuck_workers
from ddp_notebook.model import Category, Finding, Ranks, Worker, at_place, name_ranks


def stuck_data_workers(context: Context) -> Iterator[Finding]:
    """Ranks whose next batch never comes; those with the same cause at one line together."""
    waiting = context.case.waiting
    same: dict[tuple[bool, bool, str], dict[int, tuple[Worker, ...]]] = {}
    for e in context.case.ranks:
        stuck = stuck_workers(e)
        if stuck:
            due = next(worker for worker in stuck if worker.due)
            key = due.stopped, due.forked, str(due.place or "")
            same.setdefault(key, {})[e.rank] = stuck
    for (stopped, forked, _), of in same.items():
        yield _stopped(of, waiting) if stopped else _locked(of, waiting, forked)


def _locked(of: dict[int, tuple[Worker, ...]], waiting: Ranks, forked: bool) -> Finding:
    due = next(worker for worker in of[min(of)] if worker.due)
    at = at_place(due.place)
    one = sum(map(len, of.values())) == 1
    why = "; most likely it was held, or a pool of threads was in use, when "
    why = f"{why}{'it was' if one else 'they were'} forked" if forked else ""
    text = (f"{due.place}: {due.place.text}",) if due.place is not None and due.place.text else ()
    return Finding(
        Category.DATALOADER_DEADLOCK,
        tuple(of),
        f"no batch comes: {_named(of)} of the DataLoader {'waits' if one else 'wait'}{at} "
        f"for a lock that no thread releases{why}",
        'Check it with num_workers=0; then give DataLoader multiprocessing_context="spawn" (or '
        '"forkserver"), and hold no lock and start no threads before its workers are forked.',
        waiting,
        (*_facts(of, "every thread of it waits for a lock, without a time limit"), *text),
    )


def _stopped(of: dict[int, tuple[Worker, ...]], waiting: Ranks) -> Finding:
    pids = " ".join(str(worker.pid) for those in of.values() for worker in those if worker.stopped)
    are = "is" if sum(map(len, of.values())) == 1 else "are"
    return Finding(
        Category.DATALOADER_DEADLOCK,
        tuple(of),
        f"no batch comes: {_named(of)} of the DataLoader {are} stopped",
        f"Let them continue: kill -CONT {pids}",
        waiting,
        _facts(of, "stopped, by a signal or a debugger"),
    )


def _named(of: dict[int, tuple[Worker, ...]]) -> str:
    pids = [worker.pid for those in of.values() for worker in those]
    return f"the worker{'s' if len(pids) > 1 else ''} with pid {', '.join(map(str, pids))}"


def _facts(of: dict[int, tuple[Worker, ...]], what: str) -> tuple[str, ...]:
    return tuple(
        f"{name_ranks((rank,))}, worker {w.pid}: {what}; has not run for {w.still_s:.0f} s"
        for rank, those in sorted(of.items())
        for w in those
    )
