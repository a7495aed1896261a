"""Views only draw: each takes values and gives text, HTML or a figure.

ansi.py           ANSI escape codes in text a rank wrote: taken out, or turned into HTML.
bench/            Benchmarks as tables, figures and files.
doctor.py         What the doctor found, as a table: text for a terminal, HTML for a notebook.
findings.py       A diagnosis and a step table in the forms that a notebook asks for.
findings_html.py  What is wrong, and what a step of set-up gave, as HTML: no scripts, every valu
findings_text.py  What is wrong, and what a step of set-up gave, as plain text of at most 100 co
html.py           The board and the live region as HTML: no scripts, nothing to load, every valu
live_region.py    A region of a cell's output that is painted again when something changes.
notebook.py       How IPython shows our values, and how a cell's output from ranks becomes noteb
stacks.py         A tree of stacks in the forms that a notebook asks for.
stacks_html.py    Where the ranks are, as HTML: nested branches, frames of libraries folded.
stacks_text.py    Where the ranks are, as a tree in plain text of at most 100 columns.
text.py           The board and the ranks' output as plain text: what a terminal, a log and a te
"""
