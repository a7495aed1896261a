"""The activity of a rank: which call it is in, and whether it makes progress by itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ddp_notebook.diagnosis.majority import each_with
from ddp_notebook.model import (
    HAS_FAILED,
    NOT_SENT,
    OWN_STORE,
    Activity,
    Place,
    RankReport,
    ThreadError,
    Worker,
    by_value,
    cut,
    verb,
    without_ports,
)
from ddp_notebook.model.fold import MISMATCH

IN_SETUP = ("store", "rendezvous", "process-group")
"""The parts of setup in which a rank waits for the others to arrive."""

STILL_S = 1.5
"""Seconds without running after which a worker that waits for a lock of its own is stuck."""
LONG_STILL_S = 5.0
"""Seconds after which it is said where a rank stands that uses no CPU time."""


IN_A_TITLE = 60
"""How much of an error's message a title has."""
_BESIDE_OTHERS = 160
"""How much of an error stands beside what the other ranks do."""


def in_setup(report: RankReport) -> bool:
    """True of a rank that waits for others in setup."""
    return report.activity is Activity.WAITING and report.inside in IN_SETUP


def opens_store(report: RankReport) -> bool:
    """True of a rank that waits in a ``TCPStore(...)`` of the user's own code."""
    in_store = in_setup(report) and report.inside == "store"
    return in_store and report.arguments.method == OWN_STORE


def call_number(report: RankReport) -> int:
    """The number of a rank's call of init_process_group: the one it waits in, or its last."""
    if in_setup(report) and report.entered > report.left:
        return report.left + 1
    return max(1, report.left)


def works(e: RankReport) -> bool:
    """True of a rank that is busy, and of which nothing proves that it makes no progress.

    One that does not answer but runs on a core is too busy to answer: it holds the GIL.
    """
    # "Busy" is the safe answer: others then wait for it, and nothing is called stuck. It is taken
    # back only for what can be proven from outside: a loop that polls for a file which no one else
    # will write, and a DataLoader's worker all of whose threads wait for locks of its own.
    busy = e.activity is Activity.BUSY
    busy = busy or (e.activity is Activity.SILENT and e.process.state == "running")
    return busy and not e.awaits.file and not stuck_workers(e)


def thread_words(error: ThreadError) -> str:
    """``its thread 'loader' raised KeyError: 3 at cell 7, line 4, in load``."""
    what = raised_words(error.type, error.text, error.path, _BESIDE_OTHERS)
    return f"its thread {error.thread!r} raised {what}"


def stuck_workers(e: RankReport) -> tuple[Worker, ...]:
    """The workers of its DataLoader that never deliver, if the next batch is one of theirs."""
    stuck = tuple(w for w in e.awaits.workers if w.still_s >= STILL_S and (w.locked or w.stopped))
    return stuck if any(worker.due for worker in stuck) else ()


def evidence_of(e: RankReport) -> tuple[str, ...]:
    """Lines of evidence that a rank is busy: its CPU time, and the workers it waits for."""
    return (
        f"its main thread has used {e.process.main_cpu_s:.1f} s of CPU time",
        *(
            f"it waits for a batch of worker {w.pid} of its DataLoader"
            + (f", which has not run for {w.still_s:.0f} s" if w.still_s >= STILL_S else "")
            for w in e.awaits.workers
            if w.due
        ),
        *((f"it has been in {e.doing} for {e.process.still_s:.0f} s",) if stands_still(e) else ()),
        *map(thread_words, e.in_threads),
    )


def of_each(facts: Mapping[int, tuple[str, ...]]) -> tuple[str, ...]:
    """Lines of evidence; of several ranks, each with its own."""
    if len(facts) == 1:
        return next(iter(facts.values()))
    return tuple(f"rank {rank}: {line}" for rank, lines in facts.items() for line in lines)


def where_busy(e: RankReport) -> str:
    """The words after "busy": where the rank is, or that it is too busy to answer."""
    if e.activity is Activity.SILENT:
        return f" and does not answer ({e.doing})" if e.doing else " and does not answer"
    if stands_still(e):
        return f" in {e.doing}, but uses no CPU time"
    return f" in {e.doing}" if e.doing else ""


def stands_still(e: RankReport) -> bool:
    """Return whether a busy rank has been seen at one place for long, using no CPU time there.

    It may wait for something of its own (a lock, a queue, a process, a time), which may or may not
    come: it is waited for all the same, and the user sees where it is.
    """
    return e.activity is Activity.BUSY and e.process.still_s >= LONG_STILL_S and bool(e.doing)


def standing(reports: Iterable[RankReport]) -> str:
    """Return where ranks stand still, in words; empty where none does."""
    places = {e.rank: (e.doing, round(e.process.still_s)) for e in reports if stands_still(e)}
    return "; ".join(
        f"{verb(ranks, 'has', 'have')} been in {place} for {seconds} s, using no CPU time"
        for ranks, (place, seconds) in by_value(places)
    )


def raised_words(name: str, text: str, path: Sequence[Place], most: int = IN_A_TITLE) -> str:
    """Return what was raised, and where: ``KeyError: 'key7' at cell 3, line 6, in load``.

    `path` are the user's lines that it passed through; of the message so many characters.
    """
    lines = _ADDRESS.sub("", without_ports(text).strip()).splitlines()
    at = f" at {path[-1]}" if path else ""
    if most == IN_A_TITLE:
        # A title has 100 characters: the message gets what who, the type and the place leave of it.
        most = max(most // 2, min(most, 82 - len(name) - len(at)))
    return (f"{name}: {cut(lines[0], most)}" if lines else name) + at


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+(?=>)")
"""Where an object lies in memory: it differs on each rank, and says nothing."""


def way_to_error(path: Sequence[Place]) -> str:
    """``cell 3, line 8 → cell 3, line 6, in load: return d['key7']``."""
    text = f": {path[-1].text}" if path[-1].text else ""
    return f"{' → '.join(map(str, path[-6:]))}{text}"


def differing_variables(failed: Sequence[RankReport]) -> tuple[str, ...]:
    """Name the variables in which ranks differ that raised at one line: ``begin is 4 on rank 0``.

    Those in the text of the line; where they are all alike, those of its function.
    """
    known = {e.rank: e.error.variables for e in failed}
    if not all(e.error.at for e in failed) or len({e.error.at[-1] for e in failed}) != 1:
        return ()
    line, first = failed[0].error.at[-1], failed[0].error.variables
    names = [name for name in first if len({of.get(name) for of in known.values()}) > 1]
    in_line = [name for name in names if re.search(rf"\b{re.escape(name)}\b", line.text)]
    shown = in_line or (names if line.function else [])
    return tuple(
        f"`{name}` is {each_with({r: of.get(name, 'not set') for r, of in known.items()})}"
        for name in shown[:4]
    )


def _failure(report: RankReport) -> str:
    """The error of a rank; one of setup, which has no line, is a sentence by itself."""
    if not report.error.at and report.error.text.strip():
        return cut(report.error.text.strip().splitlines()[0], _BESIDE_OTHERS)
    return raised_words(report.error.type, report.error.text, report.error.at, _BESIDE_OTHERS)


_DOES = {
    Activity.BUSY: ("busy: {}", "busy"),
    Activity.HELD: ("paused {}", "paused (by %ddp_step)"),
    Activity.DEAD: ("process gone", "process gone"),
    Activity.IDLE: ("idle", "idle"),
    Activity.SILENT: ("no answer ({})", "no answer"),
}
"""The words for an activity: with what the rank does, and where that is not known."""


def _awaited(report: RankReport) -> str:
    """Return what a rank waits for: ``in `barrier` (cell 3, line 4)``, ``in store: ...``."""
    where = _CALL.sub(r"`\1`", report.doing.removeprefix(f"{report.inside}: "))
    if report.awaits.key:
        return f"for the store's key {report.awaits.key!r}{f' ({where})' if where else ''}"
    if where and report.inside not in IN_SETUP:
        return f"in {where}"
    return ": ".join(filter(None, (f"in {report.inside}", where)))


_CALL = re.compile(r"^([\w.()]+)(?= \()")


def doing(report: RankReport) -> str:
    """Return what a rank does, in words that also stand behind "ranks 0 and 1: "."""
    does, activity = report.doing, report.activity
    if activity is Activity.WAITING:
        return f"waiting {_awaited(report)}"
    if activity is Activity.FAILED and report.error.type == MISMATCH:
        # True of the culprits and of the ranks that only met them; the finding tells them apart.
        at = f" at {report.error.at[-1]}" if report.error.at else ""
        return f"{NOT_SENT}the collective{at} does not match another rank's"
    if activity is Activity.FAILED:
        return f"{HAS_FAILED}{_failure(report)}"
    if activity is Activity.BUSY and report.awaits.workers:
        return f"waiting for a batch of the DataLoader ({does})"
    if stands_still(report):
        return f"in {does} for {report.process.still_s:.0f} s, using no CPU time"
    with_place, alone = _DOES[activity]
    return with_place.format(does) if does else alone
