"""Records what a rank's training does.

data_parallel.py  torch.nn.DataParallel on this rank.
ddp.py            The one place for DDP's private API.
ddp_stage.py      The stages of `%ddp_wrap` on a rank.
digests.py        Digests of tensors, to be compared across ranks.
evaluations.py    The first evaluations of a replica, and its random numbers.
facts.py          The summary of a run: what was trained, and on what.
gradients.py      What happens to an optimizer's gradients between two steps.
hooks.py          Hooks in torch that count what happens to replicas, optimizers and samplers.
parallel/         Models in parts or without DDP: FSDP2, DTensor, pipelines, by hand.
replicas.py       What this rank's DDP objects and optimizers do, counted as they do it.
samplers.py       The samplers and loaders of this rank's batches.
saves.py          Which files this rank has written with torch.save.
step_marks.py     Marks of when the parts of each training step begin.
step_times.py     The parts of the newest training steps, with their times.
tracked.py        One DDP object, one optimizer: what each does, counted as it does it.
"""
