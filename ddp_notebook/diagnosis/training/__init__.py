"""Rules for training that ends well and is wrong.

data_parallel_rules.py  Ranks that train with torch.nn.DataParallel, which is one process, inste
ddp_construction.py     A wrap arranged for showing: its rows, what the broadcast changed, and b
device_rules.py         Replicas on devices that do not fit: two ranks on one GPU, a backend for
models.py               Models compared across ranks, and what went wrong while one was wrapped.
replicas.py             The same model on all ranks, side by side: who has it, and in what its r
rules.py                Runs that end well and are wrong: findings from what every rank knows of
sampler_rules.py        Ranks whose batches are not what distributed training needs: findings fr
"""
