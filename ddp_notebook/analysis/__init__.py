"""What the facts mean. Pure functions of values; standard library only.

timeline.py        events folded into state
board.py           state arranged in rows
trace.py           a saved run as a trace for Perfetto
steps.py           state arranged as the table after a step: who waits for whom
output.py          the ranks' output grouped by ranks that wrote the same
setup_rules.py     why set-up does not get on: the rules below, in order
argument_rules.py  what the ranks came with: values that differ, cannot work, are taken twice
presence_rules.py  who is not there: dead, done, never asked, late
store_rules.py     the store: nobody answers, the wrong one does, an earlier run is in it
failures.py        what torch's errors mean, by their words
odd.py             which ranks differ from the rest
params.py          models compared across ranks
wrapping.py        DDP's construction arranged for showing
"""
