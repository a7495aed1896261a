"""What the user's code says: what decides whether a line is reached, and what its values are.

conditions.py    The tests that decide whether a line is reached, the nearest first.
coroutines.py    Which coroutines an event loop runs beside each other.
draws.py         Random numbers that code draws for the samples of a batch.
names.py         What a test is on each rank: the same on all, of its own, by its number.
reported.py      Whether a program prints a result of its evaluation.
shared_names.py  Which names code writes, and on which names other code depends.
singled_out.py   The rank that code treats in a way of its own.
sources.py       The user's files and cells: the loops and tests on the way to a collective.
statements.py    Statements around a line: which ones hold it, how a loop goes without it.

Records show where a rank was; that a line stands under ``if rank == 0`` is seen in the code alone.
Code that is not known, or does not parse, says nothing.
"""
