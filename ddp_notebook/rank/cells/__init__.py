"""Cells and scripts run on a rank, and their output.

cell_ast.py       A cell as one module: our calls first and around its last expression, nothing
output.py         What the user's code on a rank prints and displays, on its way to the notebook
progress_bars.py  Progress bars on a rank are text: a rank has no front end of its own to draw w
runner.py         Runs a cell on this rank, by the engine's own IPython.
script_state.py   A process that is like new for a script, and as it was before when the script
scripts.py        Runs a training script on this rank, as `python script.py` would under torchru
"""
