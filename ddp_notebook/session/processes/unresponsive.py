"""What the operating system reports about a rank that does not answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from ddp_notebook.launch.process_groups import is_stopped
from ddp_notebook.model import Activity, RankReport, Ranks, RankState, Status
from ddp_notebook.state.descriptions import describe


def silent(state: RankState) -> RankReport:
    """The report of a rank whose process exists but does not answer."""
    process, cpu_s = process_of(state.pid)
    return RankReport(
        state.rank,
        Activity.SILENT,
        doing=last_known(state, process),
        process=process,
        pid=state.pid or 0,
        main_cpu_s=cpu_s,
    )


def last_known(state: RankState, process: str) -> str:
    """What the rank last reported, and whether its process is stopped."""
    stopped = f"its process {state.pid} is stopped" if process == "stopped" else ""
    known = describe(state)
    return "; ".join(filter(None, (stopped, f"when last heard: {known}" if known else "")))


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
        """Those of `ranks` that have been stopped for so long, each with what to do, in words."""
        now_s, states = time.monotonic(), self._states()
        if now_s >= self._next_s:
            self._next_s = now_s + self._LOOK_EVERY_S
            self._since = {r: self._since.get(r, now_s) for r in ranks if _is_stopped(states[r])}
        long = [r for r in self._since.keys() & {*ranks} if now_s > self._since[r] + self.LONG_S]
        return {rank: f"{_STOPPED}: kill -CONT {states[rank].pid}" for rank in sorted(long)}


_STOPPED = "its process is stopped, by kill -STOP; resume it"


def _is_stopped(state: RankState) -> bool:
    return state.status is not Status.DEAD and state.pid is not None and is_stopped(state.pid)


def process_of(pid: int | None) -> tuple[str, float]:
    """The main thread's state (sleeping, running, disk-sleep, stopped) and its CPU time.

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
