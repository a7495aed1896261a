"""The exercises of the notebooks: `check("2.1", answer)` says what is wrong with an answer.

check.py     the verb, and how an exercise is declared
answers.py   what an answer may be: a word, a number, ranks, a value per rank
ch*.py       the exercises, a module per notebook: `ch02.py` judges those of `02_….ipynb`

An answer is a plain value, mostly one that a magic has returned. Nothing here knows a session,
so a check costs nothing and cannot disturb the ranks.
"""

from ddp_notebook.workshop.check import Verdict, check

__all__ = ["Verdict", "check"]
