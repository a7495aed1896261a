"""The tools of a session besides running code.

bench.py             Benchmarks: of collectives against tensor size, and of training steps.
bench_result.py      What `%ddp_bench` returns: the measurement, and what can be done with it.
breakpoints.py       Breakpoints: set, listed, cleared, and sent to processes that are new.
ddp_construction.py  `%ddp_wrap`: a model taken through DDP's construction, one stage at a time.
fault_lab.py         The fault lab: injects a fault, shows what is found, applies the remedy.
looking.py           Where ranks stand: frames, and expressions there, and where these differ.
values.py            Variables on the ranks: set, fetched, completed, described; and output.
where.py             Where the ranks are, as one tree of Python stacks; their software.
why.py               What is wrong with the ranks now: gathers a case and has it diagnosed.
"""
