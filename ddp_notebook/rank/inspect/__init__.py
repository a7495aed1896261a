"""What a rank says about itself when it is asked.

case.py          What this rank knows about its own set-up, gathered when asked; also while main
data_workers.py  The workers of the DataLoader in which the main thread waits for a batch: do th
facts.py         What `%ddp_doctor` asks a rank, or a fresh Python: versions, backends, the envi
frames.py        Where the rank's main thread is, in words a user knows: ``all_reduce (cell 4, l
host.py          On which host, and in which network, the main thread is.
reachability.py  Whom this rank can reach, and what names mean here. Asked on the host that main
safe_repr.py     Values as short texts, made while the main thread goes on: nothing of theirs is
stacks.py        The main thread's stack for `%ddp_where`: from the user's first frame down into
"""
