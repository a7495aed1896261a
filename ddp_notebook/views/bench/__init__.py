"""Benchmarks as tables, figures and files.

export.py        A benchmark in the forms that other tools read. Nothing is decided here.
live.py          A benchmark while it runs: a progress bar, and the points there are so far.
plots.py         Plots of a benchmark. They draw numbers that are already there and decide nothi
steps.py         A benchmark of training steps as a notebook shows it: a figure, and what it say
steps_html.py    Where the time of a DDP step goes, as HTML. Needs no style sheet; every value i
steps_live.py    Training steps while they are measured: a progress bar, and the steps there are
steps_panels.py  More panels on the time of a DDP step: buckets, single steps, arrivals, and the
steps_plots.py   Where the time of a DDP step goes, as a figure of panels. They draw and decide
steps_style.py   How the plots of training steps look: colours, axes, units. Nothing is decided
steps_text.py    Where the time of a DDP step goes, in words and tables of fixed width.
table.py         A benchmark as a table: text for a terminal, HTML for a notebook.
"""
