"""Collectives observed, checked before they are sent, paused and recorded.

call_sites.py  Where in the user's code a collective was issued, and through which function of t
guard.py       Compares what ranks bring to a collective before it is issued.
log_writer.py  Writes this rank's collectives into its ring; `model.ring` says how it looks.
observer.py    A process group around torch's own that writes down, guards and can hold each col
operations.py  The operations of a process group: torch's methods, their names, and what a call
pause.py       Holds this rank before each collective, until it is stepped on.
"""
