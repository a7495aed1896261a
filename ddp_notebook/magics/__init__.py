"""The magics: parse, call one Session method, return the value it gives.

parsing.py  one parser per verb; bad input is a UsageError with the call to type
verbs.py    the magics themselves
"""

from ddp_notebook.magics.verbs import DDPMagics

__all__ = ["DDPMagics"]
