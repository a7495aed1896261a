"""The magics: parse, call one Session method, return the value it gives.

parsing.py  one parser per verb; bad input is a UsageError with the call to type
verbs.py    DDPMagics: the magics of ranks, cells and values; it inherits those below
setup.py    %ddp_step, %ddp_why, %ddp_abort, %ddp_run
wrap.py     %ddp_wrap
fault.py    %ddp_fault
doctor.py   %ddp_doctor
detached.py %ddp_wait, and what is shown of a run that nobody waits for
boards.py   the live board: a widget, and a picture for where no script runs
widgets.py  whether there can be widgets, and a saved run in one
buttons.py  what the board's buttons do, which is what the magics do
kernel_private.py  the one place for ipykernel's private parts
running.py  a cell or a script as the notebook shows it: live, then whole
"""

from ddp_notebook.magics.verbs import DDPMagics

__all__ = ["DDPMagics"]
