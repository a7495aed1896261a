"""The magics: parse, call one Session method, return the value it gives.

parsing.py  one parser per verb; bad input is a UsageError with the call to type
verbs.py    DDPMagics: the magics of ranks, cells and values; it inherits those below
setup.py    %ddp_step, %ddp_why, %ddp_abort, %ddp_run
wrap.py     %ddp_wrap
fault.py    %ddp_fault
doctor.py   %ddp_doctor
detached.py %ddp_wait, and what is shown of a run that nobody waits for
running.py  a cell or a script as the notebook shows it: live, then whole
"""

from ddp_notebook.magics.verbs import DDPMagics

__all__ = ["DDPMagics"]
