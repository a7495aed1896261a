"""Rules for training that ends without an error and is wrong.

by_hand.py           Rules about gradients and parameters that ranks average without DDP.
checkpoints.py       The rule for a state that is loaded on some ranks only.
ddp_construction.py  The steps of DDP's constructor for showing: rows, broadcast, buckets.
devices.py           Rules about devices: GPUs shared, another backend's; DataParallel for DDP.
gradients.py         Rules about gradients between the backward and the optimizer's step.
models.py            Models compared across ranks, and what failed while DDP was constructed.
randomness.py        The rule for random numbers that are the same on all ranks.
replicas.py          One model on all ranks: its replicas, and the tensors in which they differ.
rules.py             Rules about gradients, values and buffers of a run that ended without an error.
settings.py          Rules for settings that change what a rank computes, and differ.
works.py             Rules about collectives that were started and not waited for.
"""
