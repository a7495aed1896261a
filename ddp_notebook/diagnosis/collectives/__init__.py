"""Rules for collectives, and for programs that split a model or data over groups of ranks.

alignment.py      Each rank's collectives as sequences, compared: who deviates where, what can meet.
describe.py       Texts for collectives and ranks, and what a collective is for.
divergence.py     Where ranks of a group diverge, and which kind of mistake that is: `classify`.
exits.py          Rules about ranks that died or raised in a run: which was first, and why.
explain.py        The finding of each kind of divergence: what happened, why, what to change.
groups.py         Groups of some ranks: with different members, or used in a different order.
meshes.py         The mesh: where each rank is in it, and what it holds there, arranged.
out_of_step.py    Rules: mismatched collectives, ranks that diverge, stop short or are late.
p2p.py            Rules about sends and receives: unmatched, in rings, of unequal sizes.
split_models.py   Rules for ranks that share a model: splits of all_to_all, FSDP2, pipelines.
wait_graph.py     The wait-for graph of the ranks, and which of them are stuck.
"""
