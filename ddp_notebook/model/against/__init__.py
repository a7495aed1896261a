"""A run compared with the same run on one rank: what both sides write down.

comparison.py What a comparison gives: equal, parted, or not to be compared, and why.
trail.py      What a rank computed in each training step, small enough to be kept.
"""
