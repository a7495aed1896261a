"""A run on several ranks compared with the same run on one: where do they part? Pure functions.

batches.py   Whether one rank got the same samples as all ranks together, step by step.
causes.py    What the way in which they part tells of its cause.
compare.py   The comparison: the first step, parameter and line where they part.
"""
