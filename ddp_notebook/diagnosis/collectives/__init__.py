"""Rules for collectives: who diverged from the others, and how.

alignment.py      Collectives of each rank as sequences, compared: which ranks deviate, and where.
buckets.py        DDP's buckets of gradients: what a rank did not reduce of a backward pass.
compare.py        Whether two collectives can be one: operation, shape, dtype, op, root, label.
describe.py       Texts for collectives and ranks in messages and evidence.
divergence.py     Where ranks of a group diverge, and which kind of mistake that is: `classify`.
exits.py          Rules about ranks that died or raised in a run: which was first, and why.
explain.py        The finding of each kind of divergence: what happened, why, what to change.
hang.py           The rule for ranks that wait for gradients which another rank does not reduce.
out_of_step.py    Rules: mismatched collectives, ranks that diverge, refusals, late ranks.
p2p.py            Rules about sends and receives: unmatched, in rings, of unequal sizes.
stopped_short.py  Rules about ranks that finished too early, or run nothing, while others wait.
wait_graph.py     The wait-for graph of the ranks, and which of them are stuck.
"""
