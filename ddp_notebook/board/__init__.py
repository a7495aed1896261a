"""The live board under a cell: what it is made of, its widget, its buttons.

buttons.py          The live board's buttons: each does what a magic does, on a thread of its ow
controller.py       The live board in a notebook: a widget, and below it a picture for where no
kernel_messages.py  The one place for ipykernel's private parts: a page's messages while a cell
model.py            What the live board draws, as JSON: small, and the same for the same picture
replay_board.py     Widgets in a notebook: whether there can be one, and a saved run in one.
source.py           What a live board shows of a session: asked many times a second, without ask
tails.py            What the ranks issue while they issue it: the new ends of their rings, again
timeline.py         The collectives as slices for the live board's timeline: what is new, or all
timeline_svg.py     The last collectives as bars: what a page without scripts has in place of th
widget.py           The live board as a widget: one class, one script, one style sheet, nothing
"""
