"""`%ddp_attach` and `%ddp_detach`: look at a job that no notebook started."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from ddp_notebook import jobs
from ddp_notebook.errors import NoSession, UsageMistake
from ddp_notebook.magics.options import files
from ddp_notebook.magics.parser import Option
from ddp_notebook.magics.ui import CallerUi, NotebookUi
from ddp_notebook.magics.verb import Verb
from ddp_notebook.model import Diagnosis, StackTree

_VERBS = "%ddp_why, %ddp_where and %ddp_board"


def _attach(ui: NotebookUi, args: argparse.Namespace) -> None:
    if not args.job and args.slurm is None:
        found = jobs.find.listed()
        ui.output.publish({"text/plain": jobs.find.text(found), "text/html": jobs.find.html(found)})
        job = ui.attached
        ui.say("Look at one: %ddp_attach PID" if job is None else f"Attached to {job.name}.")
        return
    # `HOST:` alone lists the jobs of that host.
    if len(args.job) == 1 and args.job[0].endswith(":"):
        ui.say(jobs.hosts.listed(args.job[0].removesuffix(":")))
        return
    job = ui.attached = jobs.hosts.named(args.job, args.slurm)
    ui.board.show_job(job)
    ui.say(
        f"Attached to {_first_line(job)}\n{_VERBS} mean it from now on. Nothing is sent to it that "
        "changes what it does: all others act on the session's ranks. Back to these: %ddp_detach"
    )


ATTACH = Verb(
    "ddp_attach",
    about="Look at a job that no notebook started: one that runs on this host, or the files that "
    "one left. Most is known of one that was started with DDP_NOTEBOOK=1; of another, what py-spy "
    "shows from outside. Until %ddp_detach, %ddp_why, %ddp_where and %ddp_board mean that job. "
    "Nothing changes what it does: it is not paused, gets no signal, and goes on when the notebook "
    "ends. A rank sees of DDP_NOTEBOOK=1: two threads and five file descriptors more, "
    "DDP_NOTEBOOK_RANK_PID in its environment, functions of ours as sys.excepthook, "
    "threading.excepthook and sys.exit, which call Python's, two hooks of optimizers, and stacks "
    "in a file of ours when it crashes or gets SIGTERM. Without an argument: which jobs there are. "
    "No ranks of this session are needed. A job on another host is looked at through your own ssh, "
    "which must not ask for a password, and needs the package there: HOST:PID, or several for the "
    "hosts of one job; HOST: lists the jobs there. One of Slurm's through srun --overlap, on all "
    "its hosts. Each question runs ddp-notebook there, which ends with its answer. It is found "
    "where it is on this host, or on the PATH there; else DDP_NOTEBOOK_THERE says where. "
    "DDP_NOTEBOOK_SSH='ssh -J login' says what to run in place of ssh.",
    examples=(
        ("%ddp_attach", "your jobs on this host: which run, which are stuck"),
        ("%ddp_attach 12345", "one of them, by the pid of a rank or of torchrun"),
        ("%ddp_attach gpu07:12345", "one on another host, by ssh; gpu07: lists those there"),
        ("%ddp_attach --slurm 991234", "a job of Slurm's, on all its hosts"),
        ("%ddp_attach logs/", "dumps of torch's flight recorder, logs, a run of %ddp_save"),
    ),
    run=_attach,
    options=(
        Option(
            "--slurm JOB",
            "a job of Slurm's that runs, on all its hosts, by srun --overlap",
            default=None,
        ),
        Option(
            "job",
            "a pid; HOST:PID for another host, by your ssh; or the folder or files that a job left",
            nargs="*",
            default=[],
            completer=files,
        ),
    ),
)


def _detach(ui: NotebookUi, _args: argparse.Namespace) -> None:
    job = ui.attached
    if job is None:
        raise UsageMistake("No job is attached. Which there are: %ddp_attach")
    ui.attached = None
    ui.board.show_job(None)
    ui.say(f"Detached from {job.name}. {_VERBS} mean the session's ranks again.")


DETACH = Verb(
    "ddp_detach",
    about="Look at the session's own ranks again. The job that was attached goes on as before.",
    examples=(
        ("%ddp_detach", "%ddp_why and the others mean the session's ranks again"),
        ("%ddp_attach", "which jobs there are, and which one is attached"),
    ),
    run=_detach,
)


# -- what the verbs that look do meanwhile ---------------------------------------------------


def why(ui: CallerUi, args: argparse.Namespace, job: jobs.target.Target) -> Diagnosis | None:
    """`%ddp_why` of an attached job."""
    verdict = job.why()
    if args.json:
        _say_json(ui, job, verdict.to_json(job.name))
        return None
    notes = (f"Note: {note}" for note in verdict.unread)
    ui.say("\n".join([f"Of {_first_line(job)} This stands on: {verdict.basis}.", *notes, ""]))
    ui.show(verdict.diagnosis)  # also where it is assigned: of what else would the line above be?
    return verdict.diagnosis


def where(ui: CallerUi, args: argparse.Namespace, job: jobs.target.Target) -> StackTree | None:
    """`%ddp_where` of an attached job."""
    tree = job.where(jobs.target.ranks_of(job, args.ranks), args.locals)
    if args.json:
        _say_json(ui, job, tree.to_json())
        return None
    ui.say(f"Of {_first_line(job)}\n")
    return tree


def without_ranks(mistake: NoSession, job: jobs.target.Target | None) -> str:
    """Return what `mistake` says of a verb that needs ranks while `job` is attached."""
    if job is None:
        return str(mistake)
    return f"{mistake}. Only {_VERBS} look at {job.name}, which is attached"


def say_whose_ranks(ui: NotebookUi, verb_name: str) -> None:
    """Say that a verb which acts means the session's ranks while a job is attached."""
    # Nothing acts on an attached job. Whoever types %ddp_abort after %ddp_attach may think
    # otherwise, and would end their own cell.
    if ui.attached is not None and verb_name in _ACTS and ui.session.running:
        job = ui.attached.name
        ui.say(f"This is about the session's own ranks: {job} is only looked at")


_ACTS = tuple(f"ddp_{name}" for name in ("abort", "break", "frame", "print", "set", "step", "wait"))
"""The verbs that a user might take for ones that act on the attached job."""


def _first_line(job: jobs.target.Target) -> str:
    return f"{job.name}: {job.about}."


def _say_json(ui: CallerUi, job: jobs.target.Target, content: Mapping[str, Any]) -> None:
    ui.say(json.dumps({"job": job.name, **content}, indent=2))
