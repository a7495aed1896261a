"""Models in parts as values.

layout.py  What each rank holds of each parameter, and where each rank is in the mesh.
"""
