"""Benchmarks: what to run, and what the measurements mean. Nothing here runs on a rank.

fit.py       From measured times to a latency and a bandwidth.
intervals.py Medians with the intervals in which the next run's will lie.
plan.py      What a benchmark of collectives runs: the operations, their sizes, in which order.
result.py    What a benchmark of collectives measured: points, curves, conditions.
stats.py     From what every rank measured to a benchmark's result.
steps.py     Benchmarks of training steps: what to run, what was measured, how far to trust it.
trust.py     How far a benchmark's numbers can be trusted, and what they mean in sentences.
"""
