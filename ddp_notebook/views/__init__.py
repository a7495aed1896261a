"""Arranges values as rows, tables and trees, and draws them as text, HTML or a figure.

ansi.py         Sanitizes ranks' text: removes cursor movements, or converts it to HTML.
bench.py        Benchmarks in sentences and tables, as text and as HTML; and while they run.
bench_export.py A benchmark in the forms that other tools read: rows, CSV, nccl-tests.
bench_figures.py Benchmarks as figures: against tensor size, and against batch size.
block_plot.py   A plot of twelve lines for a terminal: columns of block characters.
board_rows.py   The state as rows, one for ranks in the same state; and in words.
board.py        The board, a row for ranks in the same state: as text and as HTML.
doctor.py       The doctor's report as a table, the worst first: as text and as HTML.
finding_code.py The code of a finding, marked: where each group of ranks is, and what decides.
findings.py     A diagnosis, with findings and remedies, as text and as HTML.
ledger.py       One training step as a table of facts: as text and as HTML.
live_region.py  A region of a cell's output that is redrawn when something changes.
markup.py       How every view's HTML looks: tones, chips, boxes, escaped text, a style sheet.
mesh.py         The mesh and what ranks hold of each parameter: as text and as HTML.
notebook.py     How IPython shows our values, and the output of ranks in a cell.
output_log.py   What each rank wrote so far, and which ranks wrote the same.
output.py       The ranks' output and displays: as text, as HTML of a running cell, folded.
stack_tree.py   The stacks of all ranks as one tree; the lines in which they are.
stacks.py       Where the ranks are, as a tree: plain text of at most 100 columns, and nested HTML.
step_rows.py    Where ranks stand at stages, collectives and lines, as step tables.
step_table.py   A step table (which ranks arrived where, and what they wait for) as text and HTML.
table.py        The one table: columns and rows in, text of fixed width and HTML out.
variable_table.py The variables of all ranks as one table: equal values are one cell.
variables.py    The variables of ranks as a table: text, and HTML.
"""
