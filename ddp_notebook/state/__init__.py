"""What events add up to, arranged for showing. Pure functions; standard library only.

board.py             State arranged for drawing: one row per rank, or per set of ranks in the sa
collective_table.py  Who stands before which collective, who waits in one, and for whom: a table
fold.py              State is a fold over events: the only way a snapshot changes.
lanes.py             State, collectives and findings as lanes: who is where, who waits for whom,
output.py            The ranks' output: what each wrote so far, and which ranks wrote the same.
setup_table.py       Where each rank stands in set-up, and who waits for whom: the table after a
stack_tree.py        The stacks of all ranks as one tree: where they are together, and where the
"""
