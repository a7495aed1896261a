"""Describes a rank's variables: short, in bounded time, and without running their code.

described.py     One variable: numbers, tensors, models, optimizers; anything else as a text.
digests.py       Digests that distinguish values with equal texts: cut texts, long lists, objects.
global_names.py  Where the user's global variables are: in cells, or in a program.
objects.py       The objects of a class that there are, whoever has them.
scopes.py        Which variables exist: those of the main thread's function, and globals.
tensors.py       Summaries of tensors' values.
"""
