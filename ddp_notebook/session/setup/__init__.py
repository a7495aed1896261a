"""Sets ranks up, sets them up again, steps them and unblocks them.

bring_up.py   Takes the ranks through the stages of set-up, all at once or step by step.
preflight.py  What is checked before ranks start, and what is named when a start has failed.
set_up.py     Brings ranks up, sets them up again, and frees them: init, restart and abort.
stepping.py   `%ddp_step`: finds what is paused (a run, set-up, construction) and steps it.
"""
