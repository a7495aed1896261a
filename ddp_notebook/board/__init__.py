"""The live board under a cell: its model, its widget, its buttons.

buttons.py          The live board's buttons: each runs a verb's own code, on a thread of its own.
controller.py       The live board in a notebook: a widget, and HTML for pages without scripts.
kernel_messages.py  Every use of ipykernel's private API: a page's messages while a cell runs.
life.py             What the ranks' processes use, second by second.
model.py            What the live board draws, as JSON: compact, and equal for equal content.
page/               The page's side of the live board: scripts and styles, joined by widget.py.
replay_board.py     Whether a notebook supports widgets, and a saved run shown in one.
running_line.js     The page's side of the line above a running cell's output.
running_line.py     The line above a running cell's output: what the run does, Where and Abort.
source.py           Reads a session's data for the live board: often, without calling the ranks.
still_picture.py    The board without scripts: what a saved notebook, nbviewer and GitHub show.
tab_contents.py     The tabs below the ranks, as JSON, and when the ranks are asked for them.
timeline.py         The newest collectives, as slices for the timeline; earlier moments of a board.
widget.py           The live board as a widget: one class, one script, one style sheet.
"""
