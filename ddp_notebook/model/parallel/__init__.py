"""Models in parts as values.

digests.py  A tensor in a few bytes, to be compared with other ranks' without sending it.
layout.py   What each rank holds of each parameter, and where each rank is in the mesh.
split.py    What must be the same on ranks that share a model, in its first training steps.
"""
