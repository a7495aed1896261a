"""Runs inside each rank; the only room that may import torch.

bench/             Benchmarks as each rank runs them.
boot.py            The first call in a rank's process: reports that it was launched.
calls.py           Every remote call, once, with its request and its answer.
cells/             Cells and scripts run on a rank, and their output.
collectives/       Collectives observed, checked before they are sent, paused and recorded.
component.py       The life cycle of the runtime's components.
control.py         Answers calls, orders and questions by name.
control_socket.py  A unix socket at which a process is asked and gets its orders.
core.py            The core of a runtime, which every rank's process has.
debugger/          Stops at lines, steps from line to line, inspects frames.
engine_private.py  Every use of ipykernel's and IPython's private API inside a rank.
events.py          The event sender.
gpu.py             What this rank's GPU does, asked without waiting for it.
inspect/           A rank's reports about itself: stacks, call sites, its state, its variables.
main_thread.py     What the main thread is doing, for threads that answer in its place.
orders.py          Takes the session's orders to run something.
prepared/          Ranks of external jobs, prepared by DDP_NOTEBOOK=1.
rank_process.py    The launch parameters of a rank's process, whichever program started it.
runtime.py         The runtime of an engine: the core of a rank, and what runs cells on it.
setup/             Sets torch.distributed up one stage at a time, and unblocks it.
torch_private.py   Every use of torch's private API, each checked before use.
training/          Records what a rank's training does.
watched.py         What any rank's process watches, asked or not.
"""
