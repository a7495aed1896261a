"""What the operating system reports about a rank that does not answer."""

from __future__ import annotations

import contextlib

from ddp_notebook.model import Activity, RankReport, RankState
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
