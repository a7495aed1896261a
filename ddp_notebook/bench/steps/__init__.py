"""Benchmarks of DDP training steps: what to run, and what it means. Nothing here runs on a rank.

arrivals.py  When each rank's buckets come to their all_reduce: spans, arrivals, stragglers.
plan.py      What a benchmark of training steps will run: blocks, batches, buckets, memory.
predict.py   Training steps at another number of ranks, by a model checked against measurements.
results.py   What `%ddp_bench --model` measured: where the time of a training step goes.
stats.py     From every rank's blocks to where the time of a training step goes.
trust.py     How reliable the times of training steps are, and the reasons for doubt.
"""
