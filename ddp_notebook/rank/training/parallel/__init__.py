"""Records sharded and split models on a rank: FSDP2, DTensor, pipelines.

fsdp_private.py        The one place for the private API of FSDP2 and DTensor.
held.py                What this rank holds of the parameters of every model.
pipelines.py           The pipelines in which this rank has stages.
pipelining_private.py  The one place for the private API of torch's pipelining.
sharded.py             The models that FSDP2 shards on this rank, and their units.
"""
