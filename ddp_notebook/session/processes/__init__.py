"""The processes of a session: its ranks and stores; also the ranks' collective logs.

collective_logs.py  Reads the ranks' collective logs from mapped files, without calling the ranks.
processes.py        Starts ranks until they accept calls, starts the store, and ends both.
script_processes.py A script's processes: starts them, receives their events, ends them.
started_ranks.py    Ranks that a script starts itself, seen as a job of its own.
store.py            The session's stores: each runs in its own process.
unresponsive.py     Dead, silent and stopped processes; those that serve the ranks are resumed.
"""
