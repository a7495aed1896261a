"""The board without scripts: what a saved notebook, nbviewer and GitHub show.

drawings.py  The last collectives of each row as a drawing: the timeline of pages without scripts.
lost.py      Hides what Jupyter says of a widget without a model, where HTML stands for the widget.
picture.py   The board as HTML without scripts, arranged as the live board is.
"""
