"""Ranks and what can be done with them; usable without a notebook.

findings.py    What was found wrong in the last run or set-up, until the next one begins.
guards.py      What a verb needs before it may begin: ranks that exist, live and wait for work.
interrupts.py  Waiting in the notebook's main thread: interrupts are noted, threads switch quickly.
options.py     The options of `%ddp_init`, checked before anything starts.
pool.py        The ranks as processes: the warm fork server, what runs now, what was lost, the end.
processes/     What runs for a session: ranks, stores, collective logs, and their folder.
queries.py     Calling ranks without waiting for answers that cannot come.
record.py      What happened so far: events, the state they add up to, and waiting for either.
runs/          Cells and scripts on the ranks, from the claim of their ranks to their end.
session.py     The session: one method per verb, each handed to the part that does it.
setup/         Ranks brought up, set up again, stepped and freed.
tools/         What a session does beside running code: DDP construction, benchmarks, faults, why.
"""

from ddp_notebook.archive.replay import Replay
from ddp_notebook.session.options import InitOptions
from ddp_notebook.session.session import Session
from ddp_notebook.session.tools.bench import BenchOptions
from ddp_notebook.session.tools.bench_result import BenchResult

__all__ = ["BenchOptions", "BenchResult", "InitOptions", "Replay", "Session"]
