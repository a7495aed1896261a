"""What a session does besides running code.

bench.py             Benchmarks: of collectives against tensor size, and of training steps.
bench_result.py      What `%ddp_bench` returns: the measurement, and what can be done with it.
ddp_construction.py  `%ddp_wrap`: a model taken through DDP's construction, one stage at a time.
debugger/            Ranks at lines: breakpoints, frames, editors.
differences.py       The first index at which a tensor of some ranks differs.
fault_lab.py         The fault lab: injects a fault, shows what is found, applies the remedy.
save.py              Writes a session's record to a file, also after the session was lost.
values.py            Variables on the ranks: set, fetched, completed, described; and output.
where.py             Where the ranks are, as one tree of Python stacks; their software.
why.py               What is wrong with the ranks now: gathers a case and has it diagnosed.
"""
