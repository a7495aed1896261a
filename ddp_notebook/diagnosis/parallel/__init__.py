"""Rules for programs that part a model or its data over ranks: groups, shards, pipelines, experts.

groups.py     Groups of some ranks: made of others, or used in another order.
layout.py    What the ranks hold, arranged: the mesh, each parameter's placement and bytes.
meshes.py     Where each rank is in the mesh: its coordinate in every dimension.
purposes.py   What a collective is for: the unit of FSDP2, the micro-batch of a pipeline.
schedules.py  Pipelines whose stages, micro-batches or schedules do not fit together.
sharding.py   Models that FSDP2 shards: wrapped in another way, or not reduced alike.
splits.py     Ranks that send each other other amounts in an all_to_all than expected.
"""
