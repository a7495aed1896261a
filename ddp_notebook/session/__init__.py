"""One method per verb; what every magic calls; usable without a notebook.

core.py        Session: the verbs
setup.py       from nothing to a verified process group, and back after a restart
cellrun.py     one cell on some ranks
running.py     sending a cell, waiting for it, stopping it
interrupts.py  an interrupt is noted, not raised, while a cell runs
guards.py      what a verb needs before it may begin
record.py      events, the state they add up to, and waiting for either
options.py     what %ddp_init was asked for
"""

from ddp_notebook.session.core import Session
from ddp_notebook.session.options import InitOptions

__all__ = ["InitOptions", "Session"]
