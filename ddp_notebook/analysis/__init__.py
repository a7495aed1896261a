"""What the facts mean. Pure functions of values; standard library only.

timeline.py          events folded into state
board.py             state arranged in rows
lanes.py             state and collectives as lanes: who waits for whom, whose doing it is
steps.py             state arranged as the table after a step: who waits for whom
stacktree.py         the ranks' stacks merged into one tree
collective_steps.py  who stands before which collective: the table of a step
reach_rules.py       ranks of several hosts that do not reach each other
trace.py             a saved run as a trace for Perfetto
output.py            the ranks' output grouped by ranks that wrote the same
setup_rules.py       why set-up does not get on: the rules below, in order
argument_rules.py    what the ranks came with: values that differ, cannot work, are taken twice
presence_rules.py    who is not there: dead, done, never asked, late
parallel_rules.py    ranks that train with DataParallel instead of DDP
loader_rules.py      DataLoaders whose workers are stuck
busy.py              whether a rank that runs code of its own gets on there
store_rules.py       the store: nobody answers, the wrong one does, an earlier run is in it
failures.py          what torch's errors mean, by their words
diagnose.py          the way in to the rules, loaded when first asked
run_rules.py         what is wrong with a run: the rules of set-up and of collectives
collective_rules.py  why ranks do not get on in a collective: the rules below, in order
fingerprint_rules.py what met in one slot: shape, dtype, operation, root, name
flow_rules.py        ranks out of step: which kind of mistake
extra_rules.py       a collective that one side issues and the other does not
loop_rules.py        a step of a loop too many, or left out
stop_rules.py        ranks that finished, while others need more of them
peer_rules.py        sends and receives, groups of some ranks
fate_rules.py        ranks that died or raised, the first in time first
picture.py           what these rules look at, and their words for it
parting.py           a fault with its two sides
fingerprints.py      whether two collectives can be one
backwards.py         which backward passes of DDP reduced all their buckets
alignment.py         the ranks' collectives side by side: where a rank parts from the others
waitfor.py           who waits for whom, and who can still get on
sources.py           what the user's code says about a line: loops and conditions
odd.py               which ranks differ from the rest
params.py            models compared across ranks
wrapping.py          DDP's construction arranged for showing
"""
