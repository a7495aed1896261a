"""Records models that are not in one DDP object: FSDP2, DTensor, pipelines, averaged by hand.

copies.py              The parameters of one optimizer that must be the same on several ranks.
fsdp_private.py        The one place for the private API of FSDP2 and DTensor.
held.py                What this rank holds of the parameters of every model.
meshes.py              Which ranks of a mesh have the same of a tensor, and which other parts.
module_hook.py         A forward pre-hook of ours, which no copy and no file takes along.
pipelines.py           The pipelines in which this rank has stages.
pipelining_private.py  The one place for the private API of torch's pipelining.
plain.py               Trained models that no DDP object contains, and copies of wrapped ones.
sharded.py             The models that FSDP2 shards on this rank, and their units.
split.py               What this rank has of a model that is split, in its first steps.
"""
