"""The user's code, read: what decides whether a line is reached, and what its values are.

conditions.py     What stands around a line: tests on the way to it, ways around it, loops.
names.py          What a test is on each rank: the same on all, of its own, by its number.
patch.py          Changes of the code that correct a mistake, as a diff.
singled_out.py    The rank that code treats in a way of its own.
sources.py        The user's files and cells: the loops and tests on the way to a collective.
training_code.py  What the code of a training prints and draws.

Records show where a rank was; that a line stands under ``if rank == 0`` is seen in the code alone.
Code that is not known, or does not parse, says nothing.
"""
