"""Cells and scripts run on a rank, and their output.

cell_ast.py       A cell as one module: our calls first and around its last expression.
ending.py         Says how a cell or a script ended on this rank.
keyboard.py       A keyboard, which no rank has: Ctrl-C, debuggers and input are answered.
names.py          What Tab, Shift-Tab and `obj?` tell of what this rank's variables are.
output.py         What the user's code on a rank prints and displays, on its way to the notebook.
progress_bars.py  Progress bars on a rank are text.
raised.py         What the user's code raised: its message and the user's lines that led there.
runner.py         Runs cells on this rank, by the engine's own IPython, and says how they ended.
scripts.py        The process of a script's rank: a new one, as torchrun's would be, and observed.
shell.py          The engine's own IPython, with our ends put to it.
terminal.py       What IPython has for a person at its terminal: exit, the notebook's magics.
threads.py        What the user's threads raised: shown, and kept for the report.
values.py         A rank's variables, on their way to the notebook.
"""
