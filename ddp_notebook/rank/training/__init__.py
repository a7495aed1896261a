"""Records what a rank's training does, and takes models through DDP's construction.

ddp.py           The one place for DDP's private API.
ddp_stage.py     The stages of `%ddp_wrap` on a rank.
digests.py       Digests of tensors, to be compared across ranks.
facts.py         The summary of a run: what was trained, and on what.
fsdp_private.py  The one place for FSDP2's and DTensor's private API: modules, meshes.
held.py          What this rank holds of each parameter, for `%ddp_mesh`.
hooks.py         Hooks in torch that count what happens to replicas, optimizers and samplers.
inputs.py        What models get: samplers, loaders, first inputs, evaluations, random numbers.
ledger.py        Records one training step, if that is asked for.
patching.py      How ours comes to run inside torch's functions, and never harms them.
pipelines.py     The one place for pipelining's private API: schedules and stages of this rank.
split.py         Models that are split over ranks, in their first training steps.
step_marks.py    Marks of when the parts of each training step begin.
step_times.py    The parts of the newest training steps, with their times.
tracker.py       What this rank's DDP objects and optimizers do, counted as they do it.
"""
