"""Starting processes: the fork server, what its children do, devices, addresses.

addresses.py      Where the processes of one session meet: addresses and ports that no other wil
child.py          The first things a child of the fork server does, before anything of ours or t
client.py         The session's end of the fork server: start it, have it spawn and signal, hear
devices.py        Which GPUs there are, and which rank gets which: decided before any rank start
environment.py    The environment that a rank's process starts with.
forkserver.py     The fork server: one process per host that has torch loaded and starts ranks i
labhosts.py       Hosts of the fault lab: network namespaces with an address and a host name eac
shared_memory.py  Shared memory that killed processes leave behind: what nobody else can take aw
siblings.py       Fork servers of one user that would be alike share their memory: one forks the
timeouts.py       Timeouts that grow with the machine's load: how long to wait for a process that starts.
"""
