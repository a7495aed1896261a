"""The line above a running cell's output: what the run does, for how long, Where and Abort.

anywidget.js     Has messages heard that anywidget would drop; the board's script has it, too.
running_line.js  The page's side.
running_line.py  The line as a widget.
"""
