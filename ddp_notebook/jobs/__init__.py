"""Jobs that no notebook started: found, asked and judged, alive or dead; and the commands for it.

commandline.py      `ddp-notebook jobs | why | where | save | run | mcp`: arguments, texts, JSON.
dead.py             What was wrong with a job that has ended, by the files that it left.
listing.py          A user's jobs on this host, as a table and as JSON.
mcp_server.py       `ddp-notebook mcp`: the jobs of this user for a program, over stdio.
never_met.py        Mistakes of set-up that logs alone prove.
outside/            A job that was not prepared, seen from outside: stacks by py-spy, /proc.
picture.py          A job as a board, and as a run in a file.
prepared.py         Jobs whose ranks were prepared: found, asked, judged.
records.py          What a prepared process left in its folder.
stacks.py           Where the ranks of a job are: stacks, or the last known lines.
targets.py          What can be looked at: a job that runs, prepared or not, or what one left.
unprepared.py       Ranks that were started without DDP_NOTEBOOK=1, seen from outside.
verdict.py          A diagnosis of such a job: what it stands on, in words, as JSON.
schema.json         The form of the JSON that `why --json` prints; `schema_jobs.json` and
                    `schema_where.json` those of `jobs` and `where`.
"""
