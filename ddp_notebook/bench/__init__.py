"""Benchmarks of collectives: what to measure, when, and what it means. Nothing here runs on a rank.

baseline.py  A run against one that was kept: which sizes changed, by intervals that do not touc
fit.py       From measured times to a latency and a bandwidth: pure, standard library only.
notes.py     What a benchmark says, in words. Pure.
ops.py       The operations that can be measured: sizes, bandwidth factors, other names.
plan.py      What a benchmark will run: operations, sizes, and how long it may take.
results.py   What a benchmark of collectives measured.
schedule.py  What to measure next: rank 0 decides, from the times so far and the time that is le
stats.py     From every rank's times to what is shown: pure, standard library only.
steps/       Benchmarks of training steps: plan, statistics, prediction.
summary.py   From what the ranks said to the whole of what was measured. Pure, standard library
trust.py     How far a benchmark's numbers can be believed, and why not further. Pure.
"""
