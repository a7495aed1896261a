"""Ranks and what can be done with them; usable without a notebook.

findings.py    What was found wrong in the last run or set-up, until the next one begins.
guards.py      Preconditions of a verb: its ranks exist, are alive and are idle.
interrupts.py  Waiting in the notebook's main thread: interrupts are noted, threads switch quickly.
options.py     The options of `%ddp_init`, checked before anything starts.
pool.py        Owns the session's processes: the warm fork server, the ranks, their shutdown.
processes/     What runs for a session: ranks, stores, collective logs, and their folder.
queries.py     Calls ranks without waiting for answers that cannot arrive.
record.py      The session's events, the state they fold into, and waiting for a change.
runs/          Cells and scripts on the ranks, from the claim of their ranks to their end.
session.py     The session: one method per verb, each handed to the part that does it.
setup/         Sets ranks up, sets them up again, steps them and unblocks them.
tools/         What a session does besides running code: DDP construction, benchmarks, faults, why.
"""

from ddp_notebook.archive.replay import Replay
from ddp_notebook.session.options import InitOptions
from ddp_notebook.session.session import Session
from ddp_notebook.session.tools.bench import BenchOptions
from ddp_notebook.session.tools.bench_result import BenchResult

__all__ = ["BenchOptions", "BenchResult", "InitOptions", "Replay", "Session"]
