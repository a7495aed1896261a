"""Saved runs: writes a run's record to a file, and reads it.

format.py   The content of a file: events, collectives, the case of each rank.
history.py  The newest events of a session, kept for a file; bounded for sessions of any length.
replay.py   A run read from a file: status, why and where as they were, without any rank.
save.py     A run written to a file, as JSON that is also a trace.
trace.py    A run as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.
"""
