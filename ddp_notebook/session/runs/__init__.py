"""Cells and scripts on the ranks, from the claim of their ranks to their end; are they stuck?

cell_syntax.py       Compiles a cell in the notebook before any rank runs it.
cells.py             Runs a cell on ranks: checks it, sends it, and says how it ended.
collective_steps.py  Steps a run from collective to collective.
controller.py        One run of a cell or a script, from the claim of its ranks to its end.
detached.py          A wait for the end of a run on a thread of its own.
gather.py            Asks ranks what they know and makes a case of it.
interruption.py      How an interrupted run stands, in words.
past.py              The runs of a session, one after another: how each ended, what was found.
post_run.py          Post-run checks: is what a finished run computed right?
registry.py          Which ranks are claimed, the run that is detached, and waiting for it.
run.py               What the ranks tell of one run: who started, who finished how, their output.
scripts.py           Runs a script on ranks as torchrun would, and says how it ended.
stall_detector.py    Decides whether ranks that wait are stuck.
"""
