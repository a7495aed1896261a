"""A rank's reports about itself: stacks, call sites, its state.

answers.py       What a rank answers about itself; whoever asks cannot change what it does.
blocked.py       For which lock, file or pipe a thread waits, as the system sees it.
case.py          What this rank knows about itself and its set-up, gathered when it is asked.
data_workers.py  The workers of the DataLoader that the main thread waits for.
elsewhere.py     Code that this process does not run as Python: compiled, or run by workers.
facts.py         Versions, backends and the environment, for `%ddp_doctor`.
frames.py        Frames told apart and described in words a user knows.
polling.py       What the user's code waits for in a loop: a file, a key, a collective, an event.
process.py       What the system says of this process: its network, whether it is runnable.
reachability.py  Which ranks this rank can reach, and what names resolve to.
safe_repr.py     Values as short texts, made without running any of their code.
stacks.py        The main thread's stack for `%ddp_where`.
store_keys.py    The key of a store for which the user's code waits.
waiting.py       What the main thread is doing: it runs, waits, is paused, or is idle.
"""
