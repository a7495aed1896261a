"""The live board under a cell: what it is made of, its widget, its buttons.

buttons.py          The live board's buttons: each runs a verb's own code, on a thread of its own.
controller.py       The live board in a notebook: a widget, and a picture for pages without scripts.
kernel_messages.py  ipykernel's private parts, all of them: a page's messages while a cell runs.
line/               The line above a running cell's output.
model.py            What the live board draws, as JSON: small, and the same for the same picture.
page/               The page's side of the live board: scripts and styles, joined by widget.py.
past.py             What a live board showed earlier: findings, lines, collectives of earlier runs.
replay_board.py     Widgets in a notebook: whether there can be one, and a saved run in one.
side_panel.py       A panel beside the notebook for the live board, by jupyter-widgets' sidecar.
source.py           What a live board shows of a session: read often, without asking the ranks.
tab_contents.py     What the tabs below the ranks show, as JSON of bounded size.
tabs.py             Fills the tabs of the pages that watch one: asks the ranks when it must.
tails.py            What the ranks issue while they issue it: the new ends of their collective logs.
timeline.py         The collectives as slices for the live board's timeline: the new ones, or all.
timeline_svg.py     The last collectives as bars: the timeline of pages without scripts.
widget.py           The live board as a widget: one class, one script, one style sheet.
"""
