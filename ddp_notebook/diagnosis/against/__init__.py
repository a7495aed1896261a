"""Compares a run on several ranks with the same run on one: where do they diverge? Pure.

batches.py   Whether one rank got the same samples as all ranks together, step by step.
causes.py    Infers the cause from the way in which they diverge.
compare.py   The comparison: the first step, parameter and line where they diverge.
"""
