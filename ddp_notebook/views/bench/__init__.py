"""Benchmarks as tables, figures and files.

export.py       A benchmark in the forms that other tools read. Nothing is decided here.
live.py         A benchmark while it runs: a progress bar, and the points that there are so far.
plots.py        Plots of a benchmark of collectives. They draw what is there and decide nothing.
steps_plots.py  Where the time of a DDP training step goes, as a figure of panels.
steps_text.py   Where the time of a DDP training step goes, in sentences and tables.
style.py        How the plots of benchmarks look: figures, colours, axes, units.
table.py        A benchmark as a table: text for a terminal, HTML for a notebook.
"""
