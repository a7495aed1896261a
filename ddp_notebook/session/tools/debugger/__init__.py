"""What can be done with ranks that stop at lines: the session's own.

breakpoints.py  Breakpoints: set, listed, cleared, and sent to processes that are new.
evaluating.py   Expressions and assignments where ranks stand.
looking.py      The frames of paused ranks, the selected frame, and watched expressions.
own_ranks.py    The ranks, as the others see them.
"""
