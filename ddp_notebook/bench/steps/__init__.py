"""Benchmarks of training steps: plan, statistics, prediction.

arrivals.py  What the stamps of a communication hook tell: spans, arrivals, stragglers. Pure, no
plan.py      What a benchmark of training steps will run. Pure, standard library only.
predict.py   Steps at another number of ranks, worked out from what was measured. Pure; it is a
results.py   What `%ddp_bench --model` measured: where the time of a DDP training step goes.
stats.py     From every rank's blocks to where the time of a step goes. Pure, standard library o
"""
