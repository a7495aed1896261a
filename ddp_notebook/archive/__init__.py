"""A run kept in a file, and read from one.

format.py   A run that is kept in a file: what happened, what the ranks issued, what was known o
history.py  How the state came to be: the newest events, kept for a file; bounded, however long
replay.py   A run read from a file: what the session's looking verbs gave then, without any rank
save.py     The session's verb that keeps a run: all that is known, in one file of JSON.
trace.py    A saved run as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.
"""
