"""The processes of the ranks and what belongs to them: stores, collective logs.

collective_logs.py  Reads what the ranks wrote down about their collectives, without asking them
lab_hosts.py        The fault lab's hosts: held by a process of the session's, and which rank is
processes.py        From nothing to ranks that take calls: the processes, the store, and their e
store.py            The session's stores: each is hosted by a process of its own, as torchrun's
unresponsive.py     What the system tells of a rank that does not answer.
"""
