"""Rules for runs that end without an error and are wrong or slow, and DDP's construction.

construction.py  DDP's construction on all ranks: models compared, what failed, its steps shown.
coverage.py      What covers each trained parameter: a reducer, an optimizer, a gradient of all.
equal.py         Values that must be the same on all ranks of one training, or on none.
ledger.py        One training step on all ranks: facts about each parameter, and no finding.
replicas.py      One model on all ranks: its replicas, and the tensors in which they differ.
slow.py          Slow ranks: those for which the others wait, and the slow part of their steps.
steps.py         What happened on the way through steps: values, factors, handles, results.
table.py         The engine of the tables: how a value is read, judged and explained.
"""
