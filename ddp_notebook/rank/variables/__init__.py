"""What a rank tells of its variables: short, in bounded time, and without running their code.

described.py  One variable: numbers, tensors, models, optimizers; anything else as a short text.
scopes.py     Which variables there are: of the function that the main thread is in, and global.
tensors.py    The values of tensors in a few numbers.
"""
