"""Processes that do not answer: dead ones, silent ones, stopped ones, as the system knows them.

A stopped rank (SIGSTOP) is named; a stopped process that serves the ranks is resumed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ddp_notebook.launch import host_facts
from ddp_notebook.launch.host_facts import ProcessState
from ddp_notebook.launch.hosts_client import ProcessStarter
from ddp_notebook.launch.placement import Placement
from ddp_notebook.launch.process_ids import pid_of
from ddp_notebook.model import (
    Activity,
    ProcessFacts,
    RankReport,
    Ranks,
    RankState,
    Snapshot,
    Stage,
    Status,
    exit_text,
)
from ddp_notebook.views.ansi import plain
from ddp_notebook.views.board_rows import describe


def silent(state: RankState, process: ProcessState) -> RankReport:
    """Return the report of a rank whose `process` exists but does not answer."""
    program = plain(process.program)[:80]
    return RankReport(
        state.rank,
        Activity.SILENT,
        doing=f"its process runs {program}" if program else last_known(state, process.state),
        process=ProcessFacts(
            state=process.state,
            pid=pid_of(state.pid),
            # What another program computes brings no rank on.
            main_cpu_s=0.0 if program else process.main_cpu_s,
            program=program,
        ),
    )


def last_known(state: RankState, process: str) -> str:
    """Return what the rank last reported, and whether its process is stopped."""
    stopped = f"its process {pid_of(state.pid)} is stopped" if process == "stopped" else ""
    known = describe(state)
    return "; ".join(filter(None, (stopped, f"last seen: {known}" if known else "")))


class StoppedRanks:
    """Finds ranks whose processes stay stopped (SIGSTOP): what they owe cannot arrive.

    `states` gives the ranks now, `stopped` those of some processes that are stopped. A rank that is
    resumed within `LONG_S` is none of them.
    """

    LONG_S = 2.5
    _LOOK_EVERY_S = 0.25

    def __init__(
        self,
        states: Callable[[], tuple[RankState, ...]],
        stopped: Callable[[Sequence[int]], Sequence[int]],
    ) -> None:
        self._states = states
        self._stopped = stopped
        self._since: dict[int, float] = {}
        self._next_s = 0.0

    def among(self, ranks: Ranks) -> dict[int, str]:
        """Return those of `ranks` that have been stopped for so long, each with the remedy."""
        now_s, states = time.monotonic(), self._states()
        if now_s >= self._next_s:
            self._next_s = now_s + self._LOOK_EVERY_S
            # Rebuilt at each look: a rank that ran in between counts from its next stop, so that
            # who stops a rank for a moment again and again is never told that it stays stopped.
            alive = [r for r in ranks if states[r].status is not Status.DEAD and states[r].pid]
            pids = self._stopped([states[r].pid for r in alive])
            stopped_now = [r for r in alive if states[r].pid in pids]
            self._since = {r: self._since.get(r, now_s) for r in stopped_now}
        long = [r for r in self._since.keys() & {*ranks} if now_s > self._since[r] + self.LONG_S]
        stopped = "its process is stopped, by kill -STOP; resume it"
        return {rank: f"{stopped}: kill -CONT {pid_of(states[rank].pid)}" for rank in sorted(long)}


def keep_awake(
    pids: Callable[[], Mapping[int, str]],
    wake: Callable[[int, str], None],
    among: Callable[[Sequence[int]], Sequence[int]] = host_facts.stopped,
) -> Callable[[], None]:
    """Watch processes that have no reason to be stopped; return what ends the watch.

    While one is stopped (SIGSTOP), everything that needs it hangs silently. `pids` maps them to
    their names, `among` gives those that are stopped; `wake` is called, on a thread, with each one
    that two consecutive checks found stopped.
    """
    ended = threading.Event()

    def watch() -> None:
        found: set[int] = set()
        while not ended.wait(0.5):
            # Found twice: who stops a process for a moment and resumes it needs no help.
            names = pids()
            stopped = {pid: names[pid] for pid in among(list(names))}
            for pid in found & stopped.keys():
                wake(pid, stopped[pid])
            found = set(stopped)

    threading.Thread(target=watch, name="ddp-awake", daemon=True).start()
    return ended.set


class MemoryKills:
    """Counts the processes that the kernel kills for lack of memory, on each host."""

    def __init__(self, starter: ProcessStarter) -> None:
        self._starter = starter
        self._before: dict[int, int | None] = {}

    def begin(self, placement: Placement) -> None:
        """Count from now on; on other hosts from when they answer, for which nothing waits."""
        before: dict[int, int | None] = {}
        self._before = before
        if not placement.far:
            self._ask(placement, before)
            return
        ask = partial(self._ask, placement, before)
        threading.Thread(target=ask, name="ddp-memory-kills", daemon=True).start()

    def _ask(self, placement: Placement, before: dict[int, int | None]) -> None:
        for host in placement.hosts:
            before[host] = self._starter.question(host, "memory_kills")

    def since(self, host: int) -> int:
        """Return how many were killed on a host since `begin`; -1 if that is not known."""
        before, now = self._before.get(host), self._starter.question(host, "memory_kills")
        return int(now - before) if now is not None and before is not None else -1


def deaths(snapshot: Snapshot) -> list[str]:
    """Return a line for each rank that died: in which stage, how, its last output."""
    lines = []
    for state in snapshot.ranks:
        if state.status is Status.DEAD:
            stage = state.entering or state.stage or Stage.LAUNCHED
            words = state.last_words.strip().splitlines()
            last = f" Last words: {words[-1].strip()}" if words else ""
            lines.append(
                f"Rank {state.rank} died in stage {stage.value}, "
                f"{exit_text(state.exit_code or 0)}.{last}"
            )
    return lines
