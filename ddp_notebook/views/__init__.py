"""Views only draw: each takes values and gives text, HTML or a figure.

ansi.py         Text that ranks wrote, made safe: without what moves a cursor, or as HTML.
bench/          Benchmarks as tables, figures and files.
board.py        The board, a row for ranks in the same state: as text and as HTML.
doctor.py       The doctor's report as a table, the worst first: as text and as HTML.
findings.py     A diagnosis, what is wrong and what to do about it: as text and as HTML.
folded.py       Long output of ranks, folded: a click shows all of it.
live_region.py  A region of a cell's output that is painted again when something changes.
markup.py       How every view's HTML looks: tones, chips, escaped text, a style sheet.
notebook.py     How IPython shows our values, and the output of ranks in a cell.
output.py       What ranks wrote and displayed: as text, and as the HTML of a running cell.
paragraphs.py   What views are built of beside tables: indented text, boxes to copy from.
stacks.py       Where the ranks are, as a tree: plain text of at most 100 columns, and nested HTML.
step_table.py   A step table, who arrived where and who waits for whom: as text and as HTML.
table.py        The one table: columns and rows in, text of fixed width and HTML out.
training/       What is told of training beside findings.
variables.py    The variables of ranks as a table: text, and HTML.
"""
