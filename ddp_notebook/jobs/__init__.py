"""Finds and diagnoses jobs that no notebook started, running or ended; also the commands for it.

commandline.py      `ddp-notebook jobs | why | where | save | mcp`: arguments, texts, JSON.
dead.py             Diagnoses an ended job from the files that it left.
hosts/              Jobs on other hosts, by ssh or srun.
listing.py          A user's jobs on this host, as a table and as JSON.
mcp_server.py       `ddp-notebook mcp`: the jobs of this user for a program, over stdio.
never_met.py        Set-up mistakes that logs alone prove.
outside/            A job that was not prepared, seen from outside: stacks by py-spy, /proc.
picture.py          Shows a job as a board, and saves it as a run.
prepared.py         Finds, queries and diagnoses jobs whose ranks were prepared.
records.py          Reads what a prepared process left in its folder.
stacks.py           Where the ranks of a job are: stacks, or the last known lines.
targets.py          What can be inspected: a running job, prepared or not, or its files.
unprepared.py       Ranks that were started without DDP_NOTEBOOK=1, seen from outside.
verdict.py          The diagnosis of such a job with its basis, as text and as JSON.
schema.json         The form of the JSON that `why --json` prints; `schema_jobs.json` and
                    `schema_where.json` those of `jobs` and `where`.

What follows is loaded when it is first used: with all that it needs, it is a fifth of the code that
`%load_ext` would otherwise wait for, and most notebooks look at no other job.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_notebook.jobs import hosts as hosts
    from ddp_notebook.jobs import listing as listing
    from ddp_notebook.jobs import picture as picture
    from ddp_notebook.jobs import prepared as prepared
    from ddp_notebook.jobs import stacks as stacks
    from ddp_notebook.jobs import targets as targets


_LATE = ("hosts", "listing", "picture", "prepared", "stacks", "targets")


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return __import__(f"{__name__}.{name}", fromlist=[name])
