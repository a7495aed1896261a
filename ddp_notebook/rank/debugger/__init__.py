"""Stops this rank at a line, steps it from line to line, and looks into its frames.

armed.py        Whether ranks may be paused: what is issued then waits long.
breakpoints.py  Where a rank is to stop, when, and how often it came by.
code_swap.py    Breakpoints compiled into functions that are loaded already (Python 3.11).
collective_calls.py  Whether an expression may issue a collective.
debugger.py     The component: who stopped where, and what lets it go on.
expressions.py  Evaluates and assigns in the frames of a rank that stands.
goals.py        How far a step goes.
instrument.py   Source with calls of ours before the lines of breakpoints (Python 3.11).
monitoring.py   The back end for Python 3.12 and later: sys.monitoring.
named.py        The code of a function, by the name that its user has for it.
not_finite.py   Watches for the first loss or gradient that is not finite.
stops.py        A thread that waits at a line, and what it does meanwhile.
tracing.py      The back end for Python 3.11: sys.settrace while it is stepped, else nothing.
"""
