"""What a rank tells of its variables: short, in bounded time, and without running their code.

described.py     One variable: numbers, tensors, models, optimizers; anything else as a text.
digests.py       What tells values apart that are written alike: cut texts, long lists, objects.
global_names.py  Where the user's global variables are: in cells, or in a program.
scopes.py        Which variables there are: of the function that main is in, and global ones.
tensors.py       The values of tensors in a few numbers.
"""
