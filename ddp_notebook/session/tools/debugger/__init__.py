"""What can be done with ranks that stop at lines: a session's, or those of a job taken over.

breakpoints.py  Breakpoints: set, listed, cleared, and sent to processes that are new.
evaluating.py   Expressions and assignments where ranks stand.
looking.py      The frames of paused ranks, the selected frame, and watched expressions.
of_job.py       All of it for a job that was taken over.
subjects.py     Whose ranks they are.
"""
