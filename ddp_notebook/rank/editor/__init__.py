"""Lets an editor in on demand, such as VS Code: it stops threads of this rank and moves them on.

debugpy_private.py  Every use of debugpy, and of the pydevd in it, each checked before use.
editor.py           The component: who has a paused thread, the editor or the notebook.
port.py             The port for one editor of this user's, and what passes through it.
"""
