"""What the user's code says: what decides whether a line is reached, and what its values are.

accumulation.py  How code counts micro-batches up to a step, and what it divides by.
buckets.py       Lists of gradients that code sends when they are full, and not at the end.
conditions.py    The tests that decide whether a line is reached, the nearest first.
coroutines.py    Which coroutines an event loop runs beside each other.
divisions.py     What a loss, a sum or a learning rate is divided by.
means.py         Means of rows, ratios or a curve's values that ranks average.
names.py         What a test is on each rank: the same on all, of its own, by its number.
running_totals.py  Sums that code adds to, and sums over the ranks again.
shared_names.py  Which names code writes, and on which names other code depends.
shares.py        Data that code divides among the ranks before a sampler divides it again.
singled_out.py   The rank that code treats in a way of its own.
skips.py         Ways from a backward to the next one that clear no gradients.
sources.py       The user's files and cells: the loops and tests on the way to a collective.
statements.py    Statements around a line: which ones hold it, how a loop goes without it.

Records show where a rank was; that a line stands under ``if rank == 0`` is seen in the code alone.
Code that is not known, or does not parse, says nothing.
"""
