"""The magics: parse, call one Session method, return the value it gives.

completion.py   Tab completion on the line of a magic: options, their values, rank sets, faults,
examples.py     Calls of each verb, and what each is for; its page of help shows them.
help.py         `%ddp_init?` shows what `%ddp_init -h` does; and `%ddp_tour`.
parsing.py      One parser per verb. Bad input is a UsageError that ends with the call to type.
register.py     The magics. Each parses its line, calls one Session method and returns the value
run_display.py  A cell or a script on the ranks as the notebook shows it: live, then whole.
verbs/          The verbs, a file or a family each.
"""

from ddp_notebook.magics.register import DDPMagics

__all__ = ["DDPMagics"]
