"""What the ranks' training steps tell, side by side.

slow.py       Who is slow, and in what: a rank for which the others wait in their steps.
"""
