"""Starts processes: the fork server, what its children do first, devices, addresses.

addresses.py       addresses and ports for a session that no other process takes
child.py           what a child of the fork server does first
client.py          the session's client of the fork server: spawn, signal, exit notifications
devices.py         which GPUs there are, and which rank gets which
environment.py     the environment variables that a child starts with
fork_server.py     the process per host that has torch loaded and forks ranks in milliseconds
gpu_links.py       the state of GPUs, what joins them, and what that carries at most
gpu_use.py         what holds the memory of GPUs, for the board
launchers.py       torchrun, mpirun and others, by their command lines
lab_hosts.py       the fault lab's hosts: network namespaces with an address and a name each
out_of_memory.py   memory that is left; processes that were killed for lack of it
preload.py         what the fork server imports before it forks
process_groups.py  processes as the system shows them, and the end of what a dead one leaves
session_folder.py  the folder and the shared memory of a session: made, locked, removed
timeouts.py        timeouts that grow with the machine's load

To launch ranks on another kind of host (ssh, Slurm), start here: write a client with the methods of
`client.ForkServerClient`, which talks to a fork server there over two pipes.
"""
