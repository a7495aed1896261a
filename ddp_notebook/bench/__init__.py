"""Benchmarks of collectives: what to measure, when, and what it means. Nothing here runs on a rank.

baseline.py  A run against a saved one: which sizes changed, by intervals that do not overlap.
fit.py       From measured times to a latency and a bandwidth, with intervals.
least_squares.py  Lines of the least relative error through times, for many resamples at once.
notes.py     A benchmark's results in sentences: the fit, stragglers, wrong results.
ops.py       The operations that can be measured: sizes, bandwidth factors, names elsewhere.
plan.py      What a benchmark will run: operations, sizes, and how long it may take.
results.py   What a benchmark of collectives measured: points, curves, conditions, changes.
schedule.py  What to measure next, as rank 0 decides it from the times so far and the time left.
stats.py     From every rank's times to points and curves: medians, intervals, stragglers.
steps/       Benchmarks of training steps.
summary.py   From all ranks' visits and answers to the whole result.
trust.py     How reliable a benchmark's numbers are, and the reasons for doubt.
"""
