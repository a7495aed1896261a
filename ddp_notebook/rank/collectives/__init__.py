"""Collectives observed, checked before they are sent, paused and recorded.

call_sites.py  Where in the user's code a collective was issued.
guard.py       Compares the ranks' arguments of a collective before it is issued.
log_writer.py  Writes this rank's collectives into its collective log.
observer.py    A process group around torch's own that records, checks and can pause.
mapped_file.py Files that ranks and the session map: room reserved, opened with care.
operations.py  The operations of a process group, and the properties of a call.
pause.py       Pauses this rank before each collective, until it is stepped.
works.py       Handles of asynchronous collectives: does the user wait in time?
splits.py      Compares what ranks send to each other in an all_to_all, before it is sent.
time_limits.py Groups, and how long what is issued in one may take: as set, or a day at a stop.
"""
