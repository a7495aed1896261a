"""Cells and scripts run on a rank, and their output.

cell_ast.py       A cell as one module: our calls first and around its last expression.
ending.py         Reports how a cell or a script ended on this rank.
keyboard.py       Replaces the keyboard, which no rank has: Ctrl-C, debuggers, input.
names.py          Answers Tab, Shift-Tab and `obj?` about this rank's variables.
on_cpu.py         A program for GPUs on the CPU: what asks for CUDA gets the CPU.
output.py         Forwards what the user's code prints and displays to the notebook.
progress_bars.py  Progress bars on a rank are text.
raised.py         What the user's code raised: its message and the user's lines that led there.
runner.py         Runs cells in the engine's own IPython, and reports how they ended.
scripts.py        The process of a script's rank: a new one, as torchrun's would be, and observed.
shell.py          The engine's own IPython, connected to our streams and compiler.
terminal.py       IPython's interactive commands on a rank: exit, the notebook's magics.
threads.py        What the user's threads raised: shown, and kept for the report.
values.py         Sends a rank's variables to the notebook.
warning_places.py Shows a warning at the user's line, not at ours.
"""
