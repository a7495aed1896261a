"""What a session does beside running code: DDP construction, benchmarks, the fault lab.

bench.py             The session's verb that measures what collectives cost.
bench_result.py      What `%ddp_bench` returns: what was measured, and what can be done with it.
bench_steps.py       The session's verb for training steps: where their time goes, on the ranks
ddp_construction.py  `%ddp_wrap`: a model taken through DDP's construction, one stage at a time.
fault_lab.py         The fault lab at work: inject a fault, show what is found, apply the remedy
lab.py               The session's verbs of the fault lab: inject a fault, apply its remedy.
measuring.py         The benchmark that goes on: what it measures, how far it is, and how it is
where.py             The session's verb that says where the ranks are.
"""
