"""Where the ranks of a job are: stacks of those that answer, the last known lines of others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ddp_notebook.cluster.questions import ask
from ddp_notebook.jobs import prepared
from ddp_notebook.jobs.prepared import Job
from ddp_notebook.model import (
    Activity,
    Doing,
    Frame,
    Place,
    RankReport,
    Ranks,
    RankStack,
    StackTree,
)
from ddp_notebook.rank import calls
from ddp_notebook.state import stack_tree

_ASK_TIMEOUT_S = 2.0
_LONGEST_TEXT = 300


def of_job(job: Job, ranks: Ranks | None = None, locals: bool = False) -> StackTree:
    """The stacks of `ranks` (all by default); with `locals`, variables of those that answer."""
    wanted = sorted(set(range(job.world_size) if ranks is None else ranks))
    sockets = {r: at for r, at in prepared.sockets_of(job).items() if r in wanted}
    request = calls.StackRequest(with_locals=locals)
    answers = ask(sockets, calls.STACK, request, _ASK_TIMEOUT_S)
    stacks = [
        RankStack(rank, answer.doing, answer.frames)
        for rank, answer in answers.items()
        if isinstance(answer, RankStack)
    ]
    others = set(wanted).difference(stack.rank for stack in stacks)
    if others:
        reports = prepared.case_of(job).ranks
        stacks += (stack_of(r, over=not job.alive) for r in reports if r.rank in others)
    return stack_tree.merge(stacks, job.world_size)


def of_reports(reports: Sequence[RankReport], ranks: Ranks | None = None) -> StackTree:
    """The same of a job that has ended."""
    size = max((report.rank for report in reports), default=-1) + 1
    wanted = (report for report in reports if ranks is None or report.rank in ranks)
    return stack_tree.merge((stack_of(report, over=True) for report in wanted), size)


def stack_of(report: RankReport, over: bool) -> RankStack:
    """A report's lines as a stack: the user's own, as it leaves out the others.

    `over`: the job has ended, so that who says nothing is no more.
    """
    activity, operation, text = report.activity, "", report.doing
    path = report.path
    if activity is Activity.FAILED:
        lines = report.error_text.strip().splitlines()[:1]
        text, path = ": ".join((report.error_type, *lines)), report.error_at or path
    elif activity is Activity.WAITING:
        operation, text = report.inside, text.removeprefix(f"{report.inside}: ")
    elif over and activity is Activity.SILENT:
        activity, text = Activity.DEAD, text or "what it did then is not recorded"
    return RankStack(
        report.rank, Doing(activity, operation, text[:_LONGEST_TEXT]), tuple(_frames(path))
    )


def _frames(path: Iterable[Place]) -> Iterable[Frame]:
    return (Frame(place.file, place.line, place.function, place.text) for place in path)
