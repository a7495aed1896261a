"""The ranks brought through set-up, stepped, set up again, freed.

bring_up.py  Takes the ranks through the stages of set-up: all at once, step by step, or not to
set_up.py    The session's verbs of set-up: step through it, ask why, give it up.
stepping.py  One step of set-up: send paused ranks on and wait until each arrived, or waits for
"""
