"""Results about training besides findings.

comparison.py A run compared with the same on one rank, as text.
mesh.py       The mesh and what ranks hold of each parameter, as text and as HTML.
"""
