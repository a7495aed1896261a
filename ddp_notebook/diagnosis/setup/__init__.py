"""Rules for set-up: why ranks do not become a process group.

arguments.py      Rules about init_process_group's arguments: invalid, different, or used twice.
data_workers.py   The rule for ranks that wait for a batch of a stuck DataLoader worker.
missing_ranks.py  Rules about ranks that others wait for: dead, stopped, finished, idle, late.
reach.py          Rules about ranks of several hosts that reach the store, but not each other.
store.py          Rules about the store: no answer, gone, left over, a key that no rank sets.
torch_errors.py   What torch's errors mean, and which of them only report another rank's fault.
"""
