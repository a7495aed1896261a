"""Compares the ranks' training steps.

slow.py       Finds slow ranks: those for which the others wait, and the slow part of their steps.
"""
