"""What events add up to, arranged for showing. Pure functions; standard library only.

board_rows.py        The state arranged for drawing: one row for ranks in the same state.
collective_table.py  Who is paused before which collective, who waits in one, and for whom.
descriptions.py      The state in words: what a rank does, how its process ended.
fold.py              State is a fold over events: the only way a snapshot changes.
line_stops.py        Where ranks are paused at lines, and from when until when they were.
line_table.py        Which ranks are paused at which line, with the source around it.
output.py            The ranks' output: what each wrote so far, and which ranks wrote the same.
setup_table.py       Which stage of set-up each rank is in, and who waits for whom.
stack_locations.py   The lines of the user's code in which ranks are, each with the code around it.
stack_tree.py        The stacks of all ranks as one tree, which branches where they differ.
variable_table.py    The variables of all ranks as one table: equal values are one cell.
"""
