"""What a session does with ranks that stop at lines.

breakpoints.py  Breakpoints: set, listed, cleared, and sent to processes that are new.
editors.py      `%ddp_attach_editor`: a port of a rank for an editor, such as VS Code.
looking.py      The frames of paused ranks, the selected frame, and watched expressions.
"""
