"""Benchmarks as each rank runs them.

collectives_task.py  Long tasks of ours on a rank, with progress on the beacon.
floors.py            What the machine itself can do, measured by the ranks beside what torch mak
gloo_thread.py       Gloo's loop threads: what they cost, and how the scheduler treats them. Lin
host_load.py         What a rank's host does while something is measured. Standard library only.
links.py             What links a machine has, as the kernel and NVIDIA's driver tell it. Nothin
loop.py              The rank's side of a benchmark: it visits sizes as rank 0 decides, times an
operations.py        The operations that are measured: how each is called, and what it must give
steps_data.py        What the timed steps are fed with, and their loss: the user's, or made to f
steps_hooks.py       When each bucket of gradients comes to its all_reduce, and what its communi
steps_loop.py        The rank's side of a benchmark of training steps.
steps_memory.py      How much memory a step needs and a rank may have, before it is taken. Runs
steps_models.py      The model whose steps are timed: one that ships, or a copy of the user's. R
steps_task.py        The benchmark of training steps on this rank: prepared without a word to th
timing.py            The timed region: a collective, and a look at the clock before and after it
"""
