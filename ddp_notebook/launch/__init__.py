"""Starts processes: the fork server, what its children do first, devices, addresses.

addresses.py       addresses and ports for a session that no other process takes
agent.py           runs on another host: a fork server there, and what passes to and from it
called_process.py  a process that makes one call, as the store's
child.py           what a child of the fork server does first
client.py          the session's client of the fork server: spawn, signal, exit notifications
devices.py         which GPUs there are, and which rank gets which
environment.py     the environment variables that a child starts with
fork_server.py     the process per host that has torch loaded and forks ranks in milliseconds
gpu_links.py       the state of GPUs, what joins them, and what that carries at most
gpu_use.py         what holds the memory of GPUs, for the board
host_facts.py      what a machine is asked about itself and its processes
hosts_client.py    the session's client of several hosts, each with an agent
launchers.py       torchrun, mpirun and others, by their command lines
lab_hosts.py       the fault lab's hosts: network namespaces with an address and a name each
out_of_memory.py   memory that is left; processes that were killed for lack of it
placement.py       which rank is on which host
preload.py         what the fork server imports before it forks
process_groups.py  processes as the system shows them, and the end of what a dead one leaves
process_ids.py     a process among those of several hosts: its host's number and its pid
session_folder.py  the folder and the shared memory of a session: made, locked, removed
ssh_hosts.py       starts agents by the user's ssh
timeouts.py        timeouts that grow with the machine's load
twin.py            the session's folder on another host: what is in it, carried both ways
wire.py            messages to and from an agent, in order, whatever the link loses

To launch ranks on another kind of host (Slurm), start here: start `agent.py` there as
`ssh_hosts.py` does.
"""
