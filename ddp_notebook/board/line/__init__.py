"""The line above a running cell's output: what the run does, for how long, Where and Abort.

running_line.js  The page's side.
running_line.py  The line as a widget.
"""
