"""Saved runs: a file with all that is known of a run, and how to read it.

format.py   What a file holds: events, collectives, what was known of each rank.
history.py  The newest events of a session, kept for a file; bounded, however long it goes on.
replay.py   A run read from a file: status, why and where as they were, without any rank.
save.py     A run written to a file, as JSON that is also a trace.
trace.py    A run as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.
"""
