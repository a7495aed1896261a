"""Processes that do not answer: dead ones, silent ones, stopped ones, as the system knows them.

A stopped rank (SIGSTOP) is named; a stopped process that serves the ranks is resumed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ddp_notebook.launch.process_groups import is_stopped
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


def silent(state: RankState) -> RankReport:
    """Return the report of a rank whose process exists but does not answer."""
    import psutil

    process, cpu_s = process_of(state.pid)
    program = ""  # the command of one that has replaced the rank's (execve)
    with contextlib.suppress(psutil.Error, OSError):
        current = psutil.Process(state.pid)
        command = current.cmdline()
        # Whoever gives a process another title changes its command. But a fork has its parent's
        # addresses, in its auxiliary vector, until it executes a program.
        own, parents = (Path(f"/proc/{pid}/auxv") for pid in (current.pid, current.ppid()))
        ours = any("ddp_notebook" in word for word in command)
        if not ours and own.read_bytes() != parents.read_bytes():
            program = plain(" ".join(command))[:80]
    return RankReport(
        state.rank,
        Activity.SILENT,
        doing=f"its process runs {program}" if program else last_known(state, process),
        process=ProcessFacts(
            state=process,
            pid=state.pid or 0,
            main_cpu_s=0.0 if program else cpu_s,  # what that computes brings no rank on
            program=program,
        ),
    )


def last_known(state: RankState, process: str) -> str:
    """Return what the rank last reported, and whether its process is stopped."""
    stopped = f"its process {state.pid} is stopped" if process == "stopped" else ""
    known = describe(state)
    return "; ".join(filter(None, (stopped, f"last seen: {known}" if known else "")))


class StoppedRanks:
    """Finds ranks whose processes stay stopped (SIGSTOP): what they owe cannot arrive.

    `states` gives the ranks now. One that is resumed within `LONG_S` is none of them.
    """

    LONG_S = 2.5
    _LOOK_EVERY_S = 0.25

    def __init__(self, states: Callable[[], tuple[RankState, ...]]) -> None:
        self._states = states
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
            stopped_now = [r for r in alive if is_stopped(states[r].pid or 0)]
            self._since = {r: self._since.get(r, now_s) for r in stopped_now}
        long = [r for r in self._since.keys() & {*ranks} if now_s > self._since[r] + self.LONG_S]
        stopped = "its process is stopped, by kill -STOP; resume it"
        return {rank: f"{stopped}: kill -CONT {states[rank].pid}" for rank in sorted(long)}


def process_of(pid: int | None) -> tuple[str, float]:
    """Return the main thread's state (sleeping, running, disk-sleep, stopped) and its CPU time.

    Empty and zero if they cannot be read.
    """
    import psutil

    if not pid:
        return "", 0.0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        main = next((thread for thread in process.threads() if thread.id == pid), None)
        return str(process.status()), main.user_time + main.system_time if main else 0.0
    return "", 0.0


def keep_awake(
    pids: Callable[[], Mapping[int, str]], wake: Callable[[int, str], None]
) -> Callable[[], None]:
    """Watch processes that have no reason to be stopped; return what ends the watch.

    While one is stopped (SIGSTOP), everything that needs it hangs silently. `pids` maps them to
    their names; `wake` is called, on a thread, with each one that two consecutive checks found
    stopped.
    """
    ended = threading.Event()

    def watch() -> None:
        found: set[int] = set()
        while not ended.wait(0.5):
            # Found twice: who stops a process for a moment and resumes it needs no help.
            stopped = {pid: name for pid, name in pids().items() if is_stopped(pid)}
            for pid in found & stopped.keys():
                wake(pid, stopped[pid])
            found = set(stopped)

    threading.Thread(target=watch, name="ddp-awake", daemon=True).start()
    return ended.set


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
