"""`%ddp_attach` and `%ddp_detach`: look at a job that no notebook started, or take it over."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from ddp_notebook import jobs
from ddp_notebook.errors import NoSession, UsageMistake
from ddp_notebook.magics.parser import Option
from ddp_notebook.magics.tab.completers import files
from ddp_notebook.magics.ui import CallerUi, NotebookUi
from ddp_notebook.magics.verb import Verb
from ddp_notebook.model import (
    Board,
    Diagnosis,
    StackTree,
    StepTable,
    name_ranks,
    verb,
)
from ddp_notebook.rank.calls import How
from ddp_notebook.session.interrupts import noted
from ddp_notebook.session.runs.steps import END, Step
from ddp_notebook.session.tools.debugger.of_job import JobDebugger
from ddp_notebook.state.collective_table import OPERATIONS

_VERBS = "%ddp_why, %ddp_where and %ddp_board"


def _attach(ui: NotebookUi, args: argparse.Namespace) -> None:
    if not args.job and args.slurm is None:
        ui.say(jobs.listing.text(jobs.listing.listed()))
        _say_which(ui)
        return
    if len(args.job) == 1 and args.job[0].endswith(":"):
        ui.say(jobs.hosts.listed(args.job[0].removesuffix(":")))
        return
    attachment = ui.session.attachment
    job = attachment.attach(args.job, slurm=args.slurm, take_over=args.take_over)
    taken = attachment.taken_over
    ui.say(
        f"Attached to {_first_line(job)}\n"
        f"{_VERBS} mean it from now on. "
        + (jobs.acting.words(taken) if taken is not None else _ONLY_LOOKED_AT)
    )


_ONLY_LOOKED_AT = (
    "Nothing is sent to it that changes what it does: all others act on the session's ranks. Back "
    "to these: %ddp_detach"
)


def _say_which(ui: NotebookUi) -> None:
    job = ui.attached
    ui.say(f"Attached to {job.name}." if job is not None else "Look at one: %ddp_attach PID")


ATTACH = Verb(
    "ddp_attach",
    about="Look at a job that no notebook started: one that runs on this host, or the files that "
    "one left. Most is known of one that was started with DDP_NOTEBOOK=1; of another, what py-spy "
    "shows from outside, and torch's flight recorder where the ranks give it away: by torch's "
    "worker server at TORCH_WORKER_SERVER_SOCKET; by NCCL's pipe or its dumps (never run). "
    "%ddp_why, %ddp_where and %ddp_board then mean that job, until %ddp_detach. Nothing changes "
    "what it does: it is not paused, gets no signal, and goes on when the notebook ends. A rank "
    "sees of DDP_NOTEBOOK=1: two threads and five file descriptors more, DDP_NOTEBOOK_RANK_PID in "
    "its environment, functions of ours as sys.excepthook, threading.excepthook and sys.exit, "
    "which call Python's, two hooks of optimizers, and stacks in a file of ours when it crashes or "
    "gets SIGTERM. With --take-over (of a job that was started with DDP_NOTEBOOK=1) %ddp_break, "
    "%ddp_step, %ddp_print, %ddp_set, %ddp_frame, %ddp_wait and %ddp_abort mean it, too, and "
    "breakpoint() in its code stops it: what they will do is said first. %ddp_detach gives it "
    "back, and so does the end of the notebook's kernel: no rank stays paused. Without an "
    "argument: which jobs there are. No ranks of this session are needed. A job on another host is "
    "looked at through your own ssh, which must not ask for a password, and needs the package "
    "there: HOST:PID, or several for the hosts of one job; HOST: lists the jobs there. One of "
    "Slurm's through srun --overlap, on all its hosts. Each question runs ddp-notebook there, "
    "which ends with its answer. It is found where it is on this host, or on the PATH there; else "
    "DDP_NOTEBOOK_THERE says where. DDP_NOTEBOOK_SSH='ssh -J login' says what to run in place of "
    "ssh.",
    examples=(
        ("%ddp_attach", "your jobs on this host: which run, which are stuck"),
        ("%ddp_attach 12345", "one of them, by the pid of a rank or of torchrun"),
        ("%ddp_attach 12345 --take-over", "the same, and it can be stopped, stepped and aborted"),
        ("%ddp_attach gpu07:12345", "one on another host, by ssh; gpu07: lists those there"),
        ("%ddp_attach --slurm 991234", "a job of Slurm's, on all its hosts"),
        ("%ddp_attach logs/", "dumps of torch's flight recorder, logs, a run of %ddp_save"),
    ),
    run=_attach,
    options=(
        Option("--take-over", "let what stops, moves and ends ranks act on it"),
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
    job, kept = ui.session.attachment.detach()
    if job is None:
        raise UsageMistake("No job is attached. Which there are: %ddp_attach")
    given_back = "" if kept is None else " It is given back: none of its ranks is paused."
    if kept:
        given_back = (
            f" {verb(kept, 'does', 'do').capitalize()} not answer, and may stay paused: attach it "
            "with --take-over and detach it once more, or end this notebook's kernel."
        )
    ui.say(f"Detached from {job.name}.{given_back} {_VERBS} mean the session's ranks again.")


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


def why(ui: CallerUi, args: argparse.Namespace, job: jobs.targets.Target) -> Diagnosis | None:
    """`%ddp_why` of an attached job."""
    verdict = job.why()
    if args.json:
        _say_json(ui, job, verdict.to_json(job.name))
        return None
    notes = (f"Note: {note}" for note in verdict.unread)
    ui.say("\n".join([f"Of {_first_line(job)} This stands on: {verdict.basis}.", *notes, ""]))
    ui.show(verdict.diagnosis)  # also where it is assigned: of what else would the line above be?
    return verdict.diagnosis


def where(ui: CallerUi, args: argparse.Namespace, job: jobs.targets.Target) -> StackTree | None:
    """`%ddp_where` of an attached job."""
    tree = job.where(jobs.targets.ranks_of(job, args.ranks), args.locals)
    if args.json:
        _say_json(ui, job, tree.to_json())
        return None
    ui.say(f"Of {_first_line(job)}\n")
    return tree


def step(ui: CallerUi, wanted: Step, debugger: JobDebugger) -> StepTable:
    """`%ddp_step` of a job that was taken over."""
    job = _acted_on(ui)
    goals = (How.COLLECTIVE.value, *OPERATIONS, END)
    if wanted.to is not None and wanted.to not in goals and not wanted.to.isdecimal():
        raise UsageMistake(
            f"{job.name} has no set-up to step: --to is a line or one of {', '.join(goals)}."
        )
    with noted() as interrupted:
        return debugger.step(wanted, interrupted)


def wait(ui: CallerUi, timeout_s: float | None, debugger: JobDebugger) -> StepTable:
    """`%ddp_wait` of a job that was taken over: until no rank can make progress by itself."""
    _acted_on(ui)
    with noted() as interrupted:
        return debugger.wait(timeout_s, interrupted)


def abort(ui: CallerUi, args: argparse.Namespace, taken: jobs.acting.TakenOver) -> Board:
    """`%ddp_abort` of a job that was taken over."""
    job = _acted_on(ui)
    ranks = jobs.targets.ranks_of(job, args.ranks)
    who = "all ranks" if ranks is None else name_ranks(ranks)
    ui.say(f"Ends what {job.name} runs on {who}: as Ctrl-C does, and what is blocked in torch.")
    left = ", ".join(f"rank {rank} (pid {pid})" for rank, pid in taken.end(ranks).items())
    if left:
        ui.say(f"Still there: {left}. It may handle the interrupt; kill PID ends a process.")
    return job.board()


def _acted_on(ui: CallerUi) -> jobs.targets.Target:
    job = ui.attached
    if job is None:
        raise UsageMistake("No job is attached. Which there are: %ddp_attach")
    return job


def without_ranks(mistake: NoSession, job: jobs.targets.Target | None, verb_name: str) -> str:
    """What `mistake` says of a verb while `job` is attached, on which most verbs do not act."""
    if job is None:
        return str(mistake)
    how = _how_to_act_on(job)
    if how and verb_name in _ACTS:
        return f"{job.name}, which is attached, is only looked at. {how}"
    looks = f"{mistake}. Only {_VERBS} look at {job.name}, which is attached"
    return f"{looks}. {how}" if how else looks


def say_whose_ranks(ui: NotebookUi, verb_name: str) -> None:
    """Say that a verb which acts means the session's ranks, while a job is only looked at."""
    job = ui.attached
    if job is None or ui.taken_over is not None:
        return
    if verb_name in _ACTS and ui.session.running:
        looks = f"This is about the session's own ranks: {job.name} is only looked at"
        ui.say(". ".join(filter(None, (looks, _how_to_act_on(job)))))


_ACTS = tuple(f"ddp_{name}" for name in ("abort", "break", "frame", "print", "set", "step", "wait"))
"""The verbs that mean a job which was taken over."""


def _how_to_act_on(job: jobs.targets.Target) -> str:
    """What to type; empty where the job has ended, or its ranks are on other hosts."""
    if isinstance(job, jobs.targets.Unprepared):
        return (
            "To act on a job, start it so: DDP_NOTEBOOK=1 torchrun train.py; then "
            "%ddp_attach PID --take-over"
        )
    if isinstance(job, jobs.targets.Prepared) and job.job.alive:
        return f"To stop, step and abort its ranks, too: %ddp_attach {job.pid} --take-over"
    return ""


def _first_line(job: jobs.targets.Target) -> str:
    return f"{job.name}: {job.about}."


def _say_json(ui: CallerUi, job: jobs.targets.Target, content: Mapping[str, Any]) -> None:
    ui.say(json.dumps({"job": job.name, **content}, indent=2))
