"""Jobs that no notebook started: found, asked and judged, alive or dead; and the commands for it.

commandline.py      `ddp-notebook jobs | why | where`: arguments, texts, JSON, exit codes.
dead.py             What was wrong with a job that has ended, by the files that it left.
prepared.py         Jobs whose ranks were prepared: found, asked, judged.
schema.json         The form of the JSON that `why --json` prints.
verdict.py          A diagnosis of such a job: what it stands on, in words, as JSON.
"""
