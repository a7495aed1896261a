"""A run compared with the same run on one rank: what both sides record.

comparison.py The result of a comparison: equal, diverged, or not comparable, and why.
trail.py      What a rank computed in each training step, small enough to be kept.
"""
