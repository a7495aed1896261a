"""torch.distributed brought up one stage at a time, and freed again.

connecting.py     Opening the store and waiting for its keys, so that both can be looked at and
errors.py         What a stage of set-up raises when it cannot be passed.
rendezvous.py     Notes each call of `init_process_group` on this rank: with what, and whether i
rescue.py         Frees the main thread when it is blocked inside torch's set-up or a gloo colle
settings.py       The variables that torch reads on this rank: set as torchrun would, changed as
sockets.py        Which of this process's sockets are torch's: those that came while it set up o
stages.py         Brings torch.distributed up on this rank, one visible stage at a time.
store_process.py  The store keeper: a process that hosts the session's TCPStore, as torchrun's a
subgroups.py      Groups that `new_group` made: after `%ddp_abort` those still in use are made a
"""
