"""Inside each rank; the one room that may import torch.

bench/             Benchmarks as each rank runs them.
boot.py            The first call in a rank's process, before ipyparallel's engine starts: the b
cells/             Cells and scripts run on a rank, and their output.
collectives/       Collectives observed, checked before they are sent, paused and recorded.
control.py         Answers questions of the session on the engine's control thread, whatever mai
engine_private.py  Every use of ipykernel's and IPython's private API inside a rank, each checke
events.py          The rank's voice: events from any thread, sent by one thread of ours to the s
inspect/           What a rank says about itself when it is asked.
setup/             torch.distributed brought up one stage at a time, and freed again.
state.py           What this rank is at, for those who ask while its main thread cannot answer.
torch_private.py   Every use of torch's private API, each checked before use. Tested against the
training/          What a rank knows of the training that runs on it.
values.py          A rank's variables, on their way to the notebook.
"""
