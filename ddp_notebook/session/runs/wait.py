"""Running a cell on its ranks to the end, or to an interrupt."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ddp_notebook.errors import CellInterrupted
from ddp_notebook.model import Ranks, format_ranks, name_ranks
from ddp_notebook.session.guards import doings
from ddp_notebook.session.interrupts import LOOK_EVERY_S
from ddp_notebook.session.record import Record
from ddp_notebook.session.runs.run import CellRun

if TYPE_CHECKING:
    from ddp_notebook.cluster.cluster import RankCluster

INTERRUPT_GRACE_S = 0.7
"""How long interrupted ranks may take to stop before control goes back without them."""
_RESEND_AFTER_S = 2.0
_SWITCH_S = 0.0005


Send = Callable[[Ranks], dict[int, Callable[[], bool]]]
"""Sends the cell to ranks; per rank, whether it replied."""


@contextmanager
def quick_switches() -> Iterator[None]:
    """Let threads change places often while this one only waits for what others receive.

    By default Python lets a thread run on for 5 ms when another one waits. With a message
    passing through three threads, that was half of the time of a short cell. For a thread beside
    the notebook's, which may wait for hours, nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def run_to_end(run: CellRun, send: Send, given_up: Callable[[], bool]) -> None:
    """Send the cell and wait until no rank is in it, or it is `given_up`.

    A reply without a start means that the engine dropped the message (it does after an
    interrupt, with status ok). It is sent once more; a rank that drops it again is lost.
    """
    with quick_switches():
        _run_to_end(run, send, given_up)


def _run_to_end(run: CellRun, send: Send, given_up: Callable[[], bool]) -> None:
    replies = send(run.ranks)
    sent_s = dict.fromkeys(run.ranks, time.monotonic())
    resent: set[int] = set()
    while not run.over.wait(LOOK_EVERY_S) and not run.done and not given_up():
        for rank in run.pending:
            waited_s = time.monotonic() - sent_s[rank]
            if rank in run.started or not replies[rank]() or waited_s < _RESEND_AFTER_S:
                continue
            if rank in resent:
                run.lost.add(rank)
                continue
            resent.add(rank)
            sent_s[rank] = time.monotonic()
            replies.update(send((rank,)))


def interrupt(run: CellRun, cluster: RankCluster, record: Record) -> CellInterrupted:
    """Stop the cell on its ranks; control goes back whether they stop or not."""
    deadline = time.monotonic() + INTERRUPT_GRACE_S
    run.interrupted = True
    while run.pending and (left_s := deadline - time.monotonic()) > 0:
        stop_started(run, cluster)
        record.wait_for(lambda: run.done, min(left_s, 0.05))
    return CellInterrupted(f"The cell was interrupted: {_who_does_what(run, record)}.", run.pending)


def stop_started(run: CellRun, cluster: RankCluster) -> None:
    """Interrupt the ranks that are in an interrupted cell; also one that begins it only now.

    Only a rank that is in the cell: one that is about to start it would lose it. And once:
    what the cell does about an interrupt must not be interrupted in turn.
    """
    for rank in run.to_stop():
        cluster.signal(rank, signal.SIGINT)


def _who_does_what(run: CellRun, record: Record) -> str:
    pending = run.pending
    lines = []
    stopped = tuple(r for r, f in run.finished.items() if f.outcome == "interrupted")
    if stopped:
        lines.append(f"{name_ranks(stopped)} stopped{_at_lines(run)}")
    for outcome, what in (("ok", "had finished"), ("error", "had raised an error")):
        before = tuple(r for r, f in run.finished.items() if f.outcome == outcome)
        if before:
            lines.append(f"{name_ranks(before)} {what}")
    if run.died:
        lines.append(f"{name_ranks(run.died)} died")
    begun = tuple(rank for rank in pending if rank in run.started)
    for doing, ranks in doings(begun, record.snapshot).items():
        lines.append(f"{name_ranks(ranks)} still in {doing}")
    if begun:
        it = "it" if len(begun) == 1 else "them"
        lines.append(
            f"get {it} back with %ddp_abort, or with new processes: %ddp_restart --ranks "
            f"{format_ranks(begun)}"
        )
    late = tuple(rank for rank in pending if rank not in run.started)
    if late:
        lines.append(f"{name_ranks(late)} did not begin it yet, and will be stopped then")
    return "; ".join(lines)


def _at_lines(run: CellRun) -> str:
    lines = sorted({f.line for f in run.finished.values() if f.outcome == "interrupted"} - {0})
    if not lines:
        return ""
    where = f"{run.script}, line" if run.script else "cell line"
    return f" at {where}{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines))}"
