"""Finds and diagnoses jobs that no notebook started, running or ended; also the commands for it.

commandline.py  `ddp-notebook jobs | why | where | save | mcp`: arguments, texts, JSON.
dumps.py        Dumps of torch's flight recorder, read without running their code.
find.py         A user's jobs on this host: as a table, as JSON, or named by a process.
frames.py       Stack frames of dumps, tracebacks and py-spy as lines of the user's code.
hosts.py        Jobs on other hosts, by ssh or srun; what a user names, on any host.
left.py         Dumps and logs that an ended job left: joined into one case, and judged.
logs.py         Errors, timeouts and exits of ranks in their logs and torchrun's.
mcp.py          `ddp-notebook mcp`: the jobs of this user for a program, over stdio.
outside.py      Ranks that were not prepared, seen from outside: /proc, and two looks at stacks.
prepared.py     Ranks that were prepared: asked, and judged with what they left.
pyspy.py        Stacks by py-spy, and what each rank does by its stack.
records.py      What prepared processes left in their folders, and the jobs that they are.
target.py       What can be looked at, each with a case and a verdict: as stacks, board, saved run.
verdict.py      The diagnosis of such a job with its basis, as text and as JSON.
schema.json     The form of the JSON that `why --json` prints; `schema_jobs.json` and
                `schema_where.json` those of `jobs` and `where`.

The modules below are loaded when they are first used: with all that they need, they are a fifth of
the code that `%load_ext` would otherwise wait for, and most notebooks look at no other job.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_notebook.jobs import find as find
    from ddp_notebook.jobs import hosts as hosts
    from ddp_notebook.jobs import prepared as prepared
    from ddp_notebook.jobs import records as records
    from ddp_notebook.jobs import target as target


_LATE = ("find", "hosts", "prepared", "records", "target")


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return __import__(f"{__name__}.{name}", fromlist=[name])
