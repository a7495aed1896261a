"""Starting processes: the fork server, what its children do, ipyparallel's launchers on it.

forkserver.py  the process that forks ranks (or starts them as ordinary processes)
siblings.py    how several notebooks share what their fork servers have loaded
child.py       the first things a child does
client.py      the session's end of the fork server
engine.py      ipyparallel's engine and controller as functions a child can be told to call
addresses.py   addresses and ports that no other session takes
labhosts.py    the fault lab's hosts: network namespaces, held by a process
launchers.py   ipyparallel launchers that start them there
"""
