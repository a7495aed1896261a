"""Cells and scripts on the ranks, from their start to their end.

cells.py             The session's verb for cells: run one on ranks, watch it, and say how it en
collective_steps.py  Steps through a cell collective by collective: let ranks go, and wait until
post_run.py          After a run that went well: is what it computed right? Asks the ranks once,
registry.py          The runs of a session: whose ranks are taken, those that were detached, and
run.py               One cell running on some ranks: who started, who finished how, and what the
script.py            Runs a script on the ranks as torchrun would, and ends when it cannot get o
scripts.py           The session's verb for scripts: run one on the ranks, as torchrun would.
stall_detector.py    Asks the ranks what they know, and decides whether a set-up that does not g
wait.py              Running a cell on its ranks to the end, or to an interrupt.
watch.py             Running a cell or a script to its end: until it is over, or can make no pro
"""
