"""One method per verb; what every magic calls; usable without a notebook.

core.py        Session: the verbs of ranks, cells and values
setupverbs.py  Session: the verbs of set-up
labverbs.py    Session: the verbs of the fault lab
looking.py     Session: where the ranks are
setup.py       the processes of the ranks and the stores, from their start to their end
store.py       a store, in a process of its own
bringup.py     the ranks through the stages of set-up; freeing them
stepping.py    one step of set-up
why.py         asks for evidence, and decides whether set-up is stuck
benchverbs.py  Session: the verb that measures collectives
benchresult.py what that returns, and the files it is kept in
cellrun.py     one cell on some ranks
scriptrun.py   one script on some ranks
underway.py    whose ranks are taken; runs that were detached, and waiting for them
watching.py    seeing a run through to its end
running.py     sending a cell, waiting for it, stopping it
wrap.py        a model through DDP's construction
faultlab.py    a fault injected, found, repaired
doctor/        whether DDP can work here
labhosts.py    the fault lab's hosts, and which rank is on which
asking.py      calling ranks without waiting for what cannot come
interrupts.py  an interrupt is noted, not raised, while a cell runs
saving.py      a run written to a file
replay.py      a run read from a file: board, why and where without ranks
guards.py      what a verb needs before it may begin
record.py      events, the state they add up to, and waiting for either
history.py     the newest of these events, kept for a file
options.py     what %ddp_init was asked for
"""

from ddp_notebook.session.benchresult import BenchResult
from ddp_notebook.session.benchverbs import BenchOptions
from ddp_notebook.session.core import Session
from ddp_notebook.session.options import InitOptions
from ddp_notebook.session.replay import Replay

__all__ = ["BenchOptions", "BenchResult", "InitOptions", "Replay", "Session"]
