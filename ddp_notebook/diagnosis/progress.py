"""Whether a rank that runs code of its own gets on there."""

from __future__ import annotations

from ddp_notebook.model import Activity, RankReport, Worker

STILL_S = 1.5
"""A worker that has not run for so long, and waits for what only itself could release, is stuck."""


def works(e: RankReport) -> bool:
    """True of a rank that is busy, and of which nothing proves that it will not get on.

    One that does not answer and runs on a core is too busy to answer: it holds Python's lock.
    """
    busy = e.activity is Activity.BUSY
    busy = busy or (e.activity is Activity.SILENT and e.process == "running")
    return busy and not e.polls_for and not stuck_workers(e)


def stuck_workers(e: RankReport) -> tuple[Worker, ...]:
    """The workers of its DataLoader that never deliver, if the next batch is one of theirs."""
    found = tuple(each for each in e.workers if _is_stuck(each))
    return found if any(each.due for each in found) else ()


def _is_stuck(worker: Worker) -> bool:
    return worker.still_s >= STILL_S and (worker.locked or worker.stopped)


def evidence_of(e: RankReport) -> tuple[str, ...]:
    """What shows how busy it is: its own CPU time, and the workers whose batch it waits for."""
    return (
        f"its main thread has used {e.main_cpu_s:.1f} s of CPU time",
        *(
            f"it waits for a batch of worker {each.pid} of its DataLoader"
            + (f", which has not run for {each.still_s:.0f} s" if each.still_s >= STILL_S else "")
            for each in e.workers
            if each.due
        ),
    )


def where_busy(e: RankReport) -> str:
    """Where it is busy, to stand after the word; of one that is too busy to answer, that."""
    if e.activity is Activity.SILENT:
        return f" and does not answer ({e.doing})" if e.doing else " and does not answer"
    return f" in {e.doing}" if e.doing else ""
