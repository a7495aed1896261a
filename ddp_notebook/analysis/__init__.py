"""What the facts mean. Pure functions of values; standard library only.

timeline.py  events folded into state
board.py     state arranged in rows
output.py    the ranks' output grouped by ranks that wrote the same
"""
