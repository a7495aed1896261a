"""Rules for collectives: who diverged from the others, and how.

alignment.py         The ranks' collectives of one group laid side by side: where a rank parts f
buckets.py           Buckets of gradients: which backward passes of DDP reduced all, some or non
compare.py           Whether two collectives can be one: operation, shape, dtype, ReduceOp, root
divergence.py        A fault with its two sides: the ranks that part, and those they part from.
divergence_rules.py  Rules about ranks out of step: which kind of mistake the first fault of a r
exit_rules.py        Rules about ranks that ended in a run: who ended first, of what, and whom t
extra_rules.py       Rules about a collective that one side of a fault issues and the other does
hang_rules.py        Ranks that wait for gradients which another rank does not reduce, by what D
loop_rules.py        Rules about loops: a step left out, a step more, a rank that is past the lo
mismatch_rules.py    Rules about what met in one slot and cannot be one: shape, dtype, operation
p2p_rules.py         Rules about sends and receives, and about groups of some ranks: who waits f
rules.py             Why ranks do not get on in a collective, or get on with wrong values: the r
source_code.py       What the text of the user's code says about a line: its loops, and what may
stop_rules.py        Rules about ranks that stopped short: all they did was right, and others ne
wait_graph.py        Who waits for whom: a graph over ranks, from where each one stands and what
"""
