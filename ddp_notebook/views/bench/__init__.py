"""Benchmarks as tables, figures and files.

export.py       A benchmark in the forms that other tools read: rows, CSV, nccl-tests.
live.py         A benchmark while it runs: a progress bar, and the points so far.
plots.py        A benchmark of collectives as a figure: time, bandwidth, iterations.
steps_plots.py  Where the time of a training step goes, as a figure of panels.
steps_text.py   Where the time of a training step goes, in sentences and tables.
style.py        How the plots of benchmarks look: figures, colours, axes, units.
table.py        A benchmark of collectives in sentences and tables: text and HTML.
"""
