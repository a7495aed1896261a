"""A rank's reports about itself: stacks, call sites, its state.

answers.py       What a rank answers about itself; whoever asks cannot change what it does.
case.py          What this rank knows about itself and its set-up, gathered when it is asked.
data_workers.py  The workers of the DataLoader that the main thread waits for.
facts.py         Versions, backends and the environment, for `%ddp_doctor`.
frames.py        Frames told apart and described in words a user knows.
polling.py       What a loop of the user's asks others for: a file, a key, a collective.
process.py       What the system says of this process: its network, whether it is runnable.
safe_repr.py     Values as short texts, made without running any of their code.
stacks.py        The main thread's stack for `%ddp_where`.
store_keys.py    The key of a store for which the user's code waits.
waiting.py       What the main thread is doing: it runs, waits for others, is paused, or is idle.
"""
