"""Inside each rank; the one room that may import torch.

bench/             Benchmarks as each rank runs them.
boot.py            The first call in a rank's process: says that it was launched.
calls.py           Every remote call, once, with its request and its answer.
cells/             Cells and scripts run on a rank, and their output.
collectives/       Collectives observed, checked before they are sent, paused and recorded.
component.py       The life cycle of the runtime's components.
control.py         Answers calls, orders and questions by name.
control_socket.py  A unix socket at which a process answers questions.
core.py            The core of a runtime: what any rank's process can have.
debugger/          Stops at lines, steps from line to line, looks into frames.
engine_private.py  Every use of ipykernel's and IPython's private API inside a rank.
events.py          The event sender.
inspect/           What a rank says about itself when it is asked.
main_thread.py     What the main thread is doing, for threads that answer in its place.
orders.py          Takes the session's orders to run something.
prepared/          A rank that nobody of ours started, with DDP_NOTEBOOK=1.
rank_process.py    What the process of a rank was started with, whoever started it.
runtime.py         The runtime of an engine: the core of a rank, and what runs cells on it.
setup/             torch.distributed brought up one stage at a time, and freed again.
torch_private.py   Every use of torch's private API, each checked before use.
training/          What a rank knows of the training that runs on it.
variables/         What a rank tells of its variables.
"""
