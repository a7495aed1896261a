"""Rules for setup: why ranks do not become a process group.

arguments.py      Rules about init_process_group's arguments: invalid, different, or used twice.
missing_ranks.py  Rules about ranks that others wait for: dead, stopped, finished, idle, late.
store.py          Rules about the store and the network: no answer, left over, a firewall.
torch_errors.py   Meanings of torch's errors, and which of them only report another rank's fault.
"""
