"""Stops this rank at a line, steps it from line to line, and inspects its frames.

armed.py        The user's code as it is loaded: whether it may pause ranks, and was edited since.
breakpoints.py  Where and when a rank stops, with hit counts.
debugger.py     The component: which thread is stopped where, and how it is resumed.
elsewhere.py    Code that this process does not run as Python: compiled, or run by data workers.
expressions.py  Evaluates and assigns in the frames of a paused rank, unless that communicates.
lines.py        How far a step goes, and what each back end does.
monitoring.py   The back end for Python 3.12 and later: sys.monitoring.
not_finite.py   Watches for the first loss or gradient that is not finite.
source.py       The source text of what runs, which of its lines have code, functions by name.
tracing.py      The back end for Python 3.11: sys.settrace.
"""
