"""Ranks and what can be done with them; usable without a notebook.

bring_up.py           Takes the ranks through the stages of setup, all at once or step by step.
collective_logs.py    Reads the ranks' collective logs from mapped files, without calling the ranks.
far_hosts.py          What a session needs to know of the other hosts that its ranks are on.
findings.py           What was found wrong in the last run or setup, until the next one begins.
guards.py             Preconditions of a verb: its ranks exist, are alive and are idle.
interrupts.py         Waiting in the main thread: interrupts are noted, threads switch quickly.
options.py            The options of `%ddp_init`, checked before anything starts.
places.py             What a rank has by its place: this machine, or another host.
pool.py               Owns the session's processes: the warm fork server, the ranks, their shutdown.
preflight.py          What is checked before ranks start, and what is named when a start failed.
queries.py            Calls ranks without waiting for answers that cannot arrive.
record.py             The session's events, the state they fold into, and waiting for a change.
runs/                 Cells and scripts on the ranks, from the claim of their ranks to their end.
script_processes.py   A script's processes, and the ranks that these start themselves.
session.py            The session: one method per verb, each handed to the part that does it.
session_processes.py  Starts ranks until they accept calls, starts the stores, and ends both.
set_up.py             Brings ranks up, sets them up again, and frees them: init, restart and abort.
stepping.py           `%ddp_step`: finds what is paused (a run, setup, construction) and steps it.
tools/                What a session does besides running code: DDP construction, benchmarks, ...
unresponsive.py       Dead, silent and stopped processes; those that serve the ranks are resumed.
"""

from ddp_notebook.archive.replay import Replay
from ddp_notebook.session.options import InitOptions
from ddp_notebook.session.session import Session
from ddp_notebook.session.tools.bench import BenchOptions
from ddp_notebook.session.tools.bench_result import BenchResult

__all__ = ["BenchOptions", "BenchResult", "InitOptions", "Replay", "Session"]
