"""Jobs on other hosts, seen by `ddp-notebook` there: by the user's ssh, or Slurm's srun.

commands.py         Runs a command of ours on another host, and reads what it prints.
joined.py           What was seen of a job on several hosts, as one.
target.py           A job on other hosts, as what `why`, `where` and the board look at.

Nothing listens anywhere for it, and nothing is sent but the command that is run there.
"""

from ddp_notebook.jobs.hosts.commands import by_ssh, listed, of_slurm

__all__ = ["by_ssh", "listed", "of_slurm"]
