"""Rules for programs that split a model or data over ranks: groups, shards, pipelines, experts.

groups.py     Groups of some ranks: with different members, or used in a different order.
layout.py    What the ranks hold, arranged: the mesh, each parameter's placement and bytes.
meshes.py     Where each rank is in the mesh: its coordinate in every dimension.
purposes.py   What a collective is for: the unit of FSDP2, the micro-batch of a pipeline.
schedules.py  Pipelines whose stages, micro-batches or schedules do not fit together.
sharding.py   Models that FSDP2 shards: wrapped differently, or reduced differently.
splits.py     Ranks that send other amounts in an all_to_all than their peers expect.
"""
