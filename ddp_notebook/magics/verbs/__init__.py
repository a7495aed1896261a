"""The verbs, a file or a family each.

bench.py        `%ddp_bench`: what communication costs. `DDPMagics` inherits the verb.
bench_steps.py  `%ddp_bench --model net --batch 8,16,32`: the verb's part that is about training
doctor.py       `%ddp_doctor`: can DDP work here?
fault.py        `%ddp_fault`: the lab of what goes wrong in set-up.
files.py        `%ddp_save` and `%ddp_replay`: a run kept in a file, and looked at without ranks
look.py         `%ddp_where`: which line each rank is at.
ranks.py        The magics of set-up: step through it, ask why, give it up, run a script.
wait.py         `%ddp_wait`, and what the notebook shows of a run that nobody waits for.
wrap.py         `%ddp_wrap`: a model becomes a DistributedDataParallel, one visible stage at a t
"""
