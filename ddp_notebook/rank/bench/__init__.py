"""Benchmarks as each rank runs them.

collectives_task.py  The benchmark of collectives on this rank: its groups, facts and progress.
floors.py            The machine's own limits: memory copies, a plain TCP socket.
gloo_thread.py       Gloo's loop threads: what they cost, and their scheduling policy. Linux only.
host_load.py         CPU time of this process and its host, and a thread's time in the run queue.
links.py             What links a machine has, as the kernel and the NVIDIA driver report them.
loop.py              Visits sizes as rank 0 decides, times each one and checks its result.
memory.py            How much memory is free, and how much a training step needs.
operations.py        The operations that are measured: how each is called, and its exact result.
steps_data.py        The input data of the timed training steps, and their loss.
steps_hooks.py       When each bucket's all_reduce begins, and when it is done.
steps_loop.py        Times training steps with and without communication, block by block.
steps_models.py      The model whose steps are timed: one that ships, or a copy of the user's.
steps_task.py        The benchmark of training steps on this rank: prepared first, then run.
timing.py            The timed region: a collective between two clock reads.
"""
