"""Finds and diagnoses jobs that no notebook started, running or ended; also the commands for it.

commandline.py      `ddp-notebook jobs | why | where | save | run | mcp`: arguments, texts, JSON.
dead.py             Diagnoses an ended job from the files that it left.
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
"""
