"""Ranks and what can be done with them; usable without a notebook.

guards.py      What a verb needs before it may begin: ranks that exist, live and wait for work.
interrupts.py  Interrupts of the notebook while ranks run a cell.
options.py     What `%ddp_init` was asked for, checked before anything starts.
processes/     The processes of the ranks and what belongs to them: stores, collective logs.
queries.py     Calling ranks without waiting for what cannot come.
record.py      What happened so far: events as they come, the state they add up to, and waiting
runs/          Cells and scripts on the ranks, from their start to their end.
session.py     The session: one method per verb. Usable without a notebook.
setup/         The ranks brought through set-up, stepped, set up again, freed.
tools/         What a session does beside running code: DDP construction, benchmarks, the fault
"""

from ddp_notebook.archive.replay import Replay
from ddp_notebook.session.options import InitOptions
from ddp_notebook.session.session import Session
from ddp_notebook.session.tools.bench import BenchOptions
from ddp_notebook.session.tools.bench_result import BenchResult

__all__ = ["BenchOptions", "BenchResult", "InitOptions", "Replay", "Session"]
