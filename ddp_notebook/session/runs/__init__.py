"""Cells and scripts on the ranks, from the claim of their ranks to their end; stall detection.

cell_syntax.py       Compiles a cell in the notebook before any rank runs it.
cells.py             Runs a cell on ranks: checks it, sends it, and reports its outcome.
controller.py        One run of a cell or a script, from the claim of its ranks to its end.
detached.py          A wait for the end of a run on a thread of its own.
gather.py            Collects the ranks' reports into a case for diagnosis.
interruption.py      Describes the state of an interrupted run.
past.py              The history of a session's runs: each one's outcome and diagnosis.
post_run.py          Post-run checks: did a finished run compute what it should?
registry.py          The run registry: claimed ranks, the detached run, and waiting for it.
run.py               The state of one run: which ranks started and finished, and their output.
scripts.py           Runs a script on ranks as torchrun would, and reports its outcome.
stall_detector.py    Decides whether ranks that wait are stuck.
steps.py             Steps a run by lines or by collectives, until each rank is paused again.
"""
