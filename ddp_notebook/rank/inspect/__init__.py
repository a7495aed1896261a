"""A rank's reports about itself: stacks, call sites, its state, its variables.

Variables are described in short, in bounded time, and without running any of the user's code.

answers.py        What a rank answers about itself: its report, what it gathers for it.
data_workers.py   The workers of the DataLoader that the main thread waits for.
facts.py          Versions, backends and the environment, for `%ddp_doctor`.
frames.py         Frames told apart and described in words a user knows.
global_names.py   Where the user's global variables are: in cells, or in a program.
objects.py        The objects of a class that there are, whoever has them.
paths_changed.py  The files and folders that this process changed last.
polling.py        What a loop of the user's asks others for: a file, a key, a collective.
process.py        What the system says of this process: its network, whether it is runnable.
safe_repr.py      Values as short texts, made without running any of their code.
stacks.py         The main thread's stack for `%ddp_where`.
store_keys.py     The key of a store for which the user's code waits.
tensor_values.py  Summaries of tensors' values.
value_digests.py  Digests that distinguish values with equal texts: cut texts, long lists, objects.
variables.py      Which variables there are, by scope, and each described.
waiting.py        What the main thread is doing: it runs, waits for others, is paused, or is idle.
"""
