"""The processes of a session: its ranks and stores; also the ranks' collective logs.

awake.py            Resumes (SIGCONT) the processes that serve the ranks when they were stopped.
collective_logs.py  Reads the ranks' collective logs from mapped files, without calling the ranks.
deaths.py           Ranks that died during set-up: in which stage and how, for an error message.
lab_hosts.py        The fault lab's hosts: the process that holds them, and each rank's host.
processes.py        Starts ranks until they accept calls, starts the store, and ends both.
script_processes.py A script's processes: starts them, receives their events, ends them.
started_ranks.py    Ranks that a script starts itself, seen as a job of its own.
store.py            The session's stores: each runs in its own process.
unresponsive.py     What the operating system reports about a rank that does not answer.
"""
