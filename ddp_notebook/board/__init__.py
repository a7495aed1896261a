"""The live board under a cell: what it is made of, its widget, its buttons.

board.css           Its colours, for light and dark pages.
board.js            The page's side of the live board: rows, buttons, timeline.
buttons.py          The live board's buttons: each runs a verb's own code, on a thread of its own.
controller.py       The live board in a notebook: a widget, and a picture for pages without scripts.
kernel_messages.py  ipykernel's private parts, all of them: a page's messages while a cell runs.
model.py            What the live board draws, as JSON: small, and the same for the same picture.
replay_board.py     Widgets in a notebook: whether there can be one, and a saved run in one.
running_line.js     The page's side of the line above a running cell's output.
running_line.py     The line above a running cell's output: what the run does, Where and Abort.
side_panel.py       A panel beside the notebook for the live board, by jupyter-widgets' sidecar.
source.py           What a live board shows of a session: read often, without asking the ranks.
tails.py            What the ranks issue while they issue it: the new ends of their collective logs.
timeline.py         The collectives as slices for the live board's timeline: the new ones, or all.
timeline_svg.py     The last collectives as bars: the timeline of pages without scripts.
widget.py           The live board as a widget: one class, one script, one style sheet.
"""
