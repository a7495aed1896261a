"""What is told of training beside findings.

comparison.py A run compared with the same on one rank, as text.
"""
