"""What runs for a session: the processes of its ranks, stores, and collective logs.

awake.py            Has the processes that serve the ranks go on when something stopped them.
collective_logs.py  Reads what the ranks wrote down about their collectives, without asking them.
deaths.py           Which ranks died during set-up, in which stage, how; for an error.
lab_hosts.py        The fault lab's hosts: held by a process, and which rank is on which.
processes.py        From nothing to ranks that take calls: the processes, the store, and their end.
store.py            The session's stores: each is hosted by a process of its own.
unresponsive.py     What the operating system tells of a rank that does not answer.
"""
