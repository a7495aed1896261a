"""Views only draw: each takes a value of the model and gives text, HTML or a figure.

text.py, html.py  the board and the ranks' output
findings.py       a diagnosis or a step table, in both forms: findings_text.py, findings_html.py
stacks.py         a tree of stacks, in both forms: stacks_text.py, stacks_html.py
doctor.py         what the doctor found
bench.py          a benchmark as a table
bench_plots.py    a benchmark as a figure
bench_live.py     a benchmark while it runs
bench_export.py   a benchmark in the forms that other tools read
steps.py          training steps as a figure and tables; steps_*.py are its parts
live.py           a region of a cell's output that is painted again
notebook.py       how IPython shows our values
ansi.py           escape codes in text a rank wrote
"""
