"""Rules for what ranks read, and for what they report of it.

evaluations.py  Rules about evaluations: different statistics, results that are never combined.
loaders.py      Rules for loaders that give ranks the same batches, all or some, or one too often.
reported.py     Whether a program prints a result of its evaluation.
samplers.py     Rules about DistributedSampler: wrong shards, other orders, seeds or epochs.
totals.py       The rule for sums over ranks that are added to, and summed over ranks again.
"""
