"""What a rank knows of the training that runs on it.

data_parallel.py  torch.nn.DataParallel on this rank: who trains with it, and what its errors me
ddp.py            The one place for DDP's private API: its construction by stages, and what it k
ddp_stage.py      The frame around each stage of `%ddp_wrap` on a rank: what fails there is an a
digests.py        Tensors in a few bytes, to be compared across ranks. Bounded in time and in nu
facts.py          The facts of a run, gathered when it is over: `model.facts` says what they are
hooks.py          Has torch tell of what it does with replicas, optimizers and samplers: `attach
replicas.py       What this rank's DDP objects and optimizers do, counted as they do it.
samplers.py       What the batches of this rank come from: DistributedSamplers, and loaders with
"""
