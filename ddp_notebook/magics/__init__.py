"""The magics: each is a `Verb`, a value that defines it completely.

cell_output.py  The output of the notebook cell that runs: text, MIME bundles, progress.
completion.py   Answers for Tab and Shift-Tab, on the line of a magic and in a cell for ranks.
hints.py        Additions to IPython's error messages: the intended verb, and %debug.
live_board.py   The live board of a notebook: shown in one cell at a time.
options.py      Options that several verbs have, and the completions of their values.
parser.py       The options of a verb, and the parser of its line: bad input ends with a call.
reference.py    The reference page, made from the verbs: notebooks/REFERENCE.md.
register.py     The verbs as IPython's magics, and as the live board's buttons.
run_display.py  How a notebook shows a cell or script on the ranks: live, then whole.
ui.py           The objects that a verb uses: the session, the shell, the cell's output, the board.
verb.py         A verb as a value: everything about one magic.
verbs/          The verbs, a file or a family each. A new verb: a file there, a line in `VERBS`.
"""

from ddp_notebook.magics.register import load, unload

__all__ = ["load", "unload"]
