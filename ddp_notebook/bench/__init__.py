"""What communication costs: the plan, the loop each rank runs, and the statistics.

In the notebook's kernel, standard library only:
plan.py        what to measure, and for how long
schedule.py    what to measure next (rank 0 decides)
stats.py       medians and their intervals
fit.py         latency and bandwidth
trust.py       how far to believe it
words.py       what it means
baseline.py    against a run that was kept
summary.py     all of these from what the ranks said
steps_*.py     the same of training steps: plan, stats (with arrivals), predict

On the ranks:
loop.py        visits sizes, times and checks them
operations.py  each operation, and what it must give
timing.py      the timed region
gloothread.py  gloo's loop threads
conditions.py  what else the host was doing
floors.py      what the machine itself can do
links.py       what links it has
steps_*.py     of training steps: models, data, memory, loop (with hooks)
"""
