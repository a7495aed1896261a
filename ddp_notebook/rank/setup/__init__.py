"""Sets torch.distributed up one stage at a time, and unblocks it.

connecting.py     Opening the store and waiting for its keys.
errors.py         What a stage of setup raises when it cannot be passed, and a call that is refused.
listening.py      A socket that listens for a store; why it cannot, and who does instead.
own_stores.py     Stores that the user's own code opens.
pasted.py         A whole program in a cell: its group is the session's, its launcher is refused.
reachability.py   Which ranks this rank can reach, and what names resolve to.
rendezvous.py     Records each call of `init_process_group` on this rank.
rescue.py         Unblocks the main thread.
settings.py       The variables that torch reads on this rank.
sockets.py        Which of this process's sockets are torch's.
stages.py         Brings torch.distributed up on this rank, one visible stage at a time.
store_process.py  The store process: it hosts the session's TCPStore, as torchrun's agent does.
subgroups.py      Groups of `new_group`, made again after `%ddp_abort`.
"""
