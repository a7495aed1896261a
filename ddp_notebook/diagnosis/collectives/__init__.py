"""Rules for collectives, and for programs that split a model or data over groups of ranks.

alignment.py      Collectives of each rank as sequences, compared: which ranks deviate, and where.
buckets.py        DDP's buckets of gradients: what a rank did not reduce of a backward pass.
compare.py        Whether two collectives can be one: operation, shape, dtype, op, root, label.
describe.py       Texts for collectives and ranks, and what a collective is for.
divergence.py     Where ranks of a group diverge, and which kind of mistake that is: `classify`.
exits.py          Rules about ranks that died or raised in a run: which was first, and why.
explain.py        The finding of each kind of divergence: what happened, why, what to change.
groups.py         Groups of some ranks: with different members, or used in a different order.
hang.py           The rule for ranks that wait for gradients which another rank does not reduce.
meshes.py         The mesh: where each rank is in it, and what it holds there, arranged.
out_of_step.py    Rules: mismatched collectives, ranks that diverge, refusals, late ranks.
p2p.py            Rules about sends and receives: unmatched, in rings, of unequal sizes.
schedules.py      Pipelines whose stages, micro-batches or schedules do not fit together.
sharding.py       Models that FSDP2 shards: wrapped differently, or reduced differently.
splits.py         Ranks that send other amounts in an all_to_all than their peers expect.
stopped_short.py  Rules about ranks that finished too early, or run nothing, while others wait.
wait_graph.py     The wait-for graph of the ranks, and which of them are stuck.
"""
