"""Benchmarks as each rank runs them.

collectives.py The benchmark of collectives: visits sizes, times each one, checks its result.
machine.py     What the machine gives: free memory, CPU time of this process and its host.
operations.py  The operations that are measured: how each is called, and its exact result.
steps.py       The benchmark of training steps: prepared first, then timed block by block.
subject.py     The model whose steps are timed, what it is fed with, and its loss.
"""
