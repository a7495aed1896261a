"""Cells and scripts on the ranks, from the claim of their ranks to their end; stall detection.

endings.py           How a run ended, in words: its result and its error.
gather.py            Asks the ranks: for reports, and for what a run computed.
registry.py          Which run has which ranks; runs cells and scripts, and waits for them.
run.py               One run: claimed, sent, watched, at rest, ended; the table of its states.
run_events.py        What a run's ranks have told: who is in it, how each left it, what it wrote.
scripts.py           A script on the ranks, as torchrun would run it.
stall_detector.py    Decides whether ranks that wait are stuck.
"""
