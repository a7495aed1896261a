"""Diagnoses an ended job from the files that it left.

Files say less than live ranks. What a rank issued after its dump is unknown, so a missing
collective is never proof; a mismatch in one slot is. The rules are those of a session; what they
cannot decide on less evidence is undecided, with the facts.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ddp_notebook.archive.replay import Replay, is_saved_run
from ddp_notebook.diagnosis import diagnose_run, failures
from ddp_notebook.diagnosis.collectives.exits import GOT_TOO_MUCH
from ddp_notebook.diagnosis.deaths import deaths
from ddp_notebook.diagnosis.progress import doing
from ddp_notebook.evidence.gathered import Gathered, gather
from ddp_notebook.jobs.never_met import absent, never_met
from ddp_notebook.jobs.verdict import Verdict, for_others, own_errors
from ddp_notebook.model import (
    Activity,
    Case,
    Category,
    Collectives,
    Diagnosis,
    Finding,
    RankReport,
    Ranks,
    at_place,
    name_ranks,
)
from ddp_notebook.views.ansi import plain

Files = Replay | Gathered
"""What was read of a job: a saved run, or dumps and logs."""


def read(paths: Sequence[Path]) -> Files:
    """What is in files. Raises UsageMistake where they are none of a job."""
    if len(paths) == 1 and is_saved_run(paths[0]):
        return Replay.read(paths[0])
    return gather(paths)


def why(paths: Sequence[Path]) -> Verdict:
    """The verdict on the files of a job. Raises UsageMistake where they are none."""
    return verdict(read(paths))


def verdict(files: Files) -> Verdict:
    """The same, of files that were read. Raises UsageMistake where a saved run knows no ranks."""
    if isinstance(files, Replay):
        return for_others(files.why(), basis(files))
    return for_others(judged(files), basis(files), files.unread)


def case(files: Files) -> Case | None:
    """The case of the ranks; None for a saved run without one."""
    return files.saved.case if isinstance(files, Replay) else files.case


def judged(gathered: Gathered) -> Diagnosis:
    """The diagnosis of what is in files."""
    case = gathered.case
    # Without lines of code the rules cannot tell an order from a condition.
    by_rules = case if gathered.stacks else replace(case, collectives=Collectives())
    diagnosis = diagnose_run(by_rules)
    findings = [f for f in diagnosis.findings if not _is_victim(f, case)]
    if all(finding.passing for finding in findings):
        findings += [
            *never_met(case, gathered.connects),
            *_ended_in_set_up(case),
            *own_errors(case),
            *_conditional(by_rules),
        ]
    findings = findings or _died(case) or _left(case) or _undecided(gathered)
    what = {report.rank: _doing(report) for report in case.ranks}
    diagnosis = replace(diagnosis, findings=tuple(findings), doing=what)
    sure = findings or _all_ended_well(case)
    return replace(diagnosis, unsure="" if sure else _NOT_KNOWN)


def basis(files: Files) -> str:
    """The basis of a verdict."""
    if isinstance(files, Replay):
        observed = files.saved.observed
        stood = f" ({plain(observed.basis)})" if observed is not None and observed.basis else ""
        return f"the saved run {files.name}{stood}"
    parts = []
    if files.dumps:
        stacks = "with stacks" if files.stacks else "without stacks"
        parts.append(f"flight-recorder dumps of {name_ranks(files.dumps)} ({stacks})")
    if files.logs:
        parts.append(f"logs of {name_ranks(files.logs)}")
    if not parts:
        parts.append("a log of torchrun")
    return " and ".join(parts)


def _is_victim(finding: Finding, case: Case) -> bool:
    """True if C++ code aborted it: also for what another rank sent, or did not send in time.

    Or for nothing that matters, when all was done.
    """
    died = finding.category is Category.RANK_DIED
    return died and any(e.exit_code == _ABORTED for e in case.ranks if e.rank in finding.ranks)


_ABORTED = -signal.SIGABRT.value
_NOT_KNOWN = "No problem is seen in these files; how the job went on is not in them."


def _died(case: Case) -> list[Finding]:
    """Processes that ended by a signal or an exit code, if no rank is known to wait for them."""
    dead = [report for report in case.ranks if report.activity is Activity.DEAD]
    return [finding for finding in deaths(case, dead, ()) if not _is_victim(finding, case)]


def _left(case: Case) -> list[Finding]:
    """A rank that ended well, where all others lost their connection to one that had gone."""
    finished = tuple(report.rank for report in case.ranks if report.exit_code == 0)
    lost = case.where(Activity.FAILED)
    if len(finished) != 1 or len(lost) + 1 != case.world_size:
        return []
    findings = failures.raised_in(case, finished)
    return [finding for finding in findings if finding.ranks == finished]


def _ended_in_set_up(case: Case) -> Iterable[Finding]:
    """Ranks whose process ended normally while others waited in set-up until their timeout."""
    if any(case.collectives.of.values()):
        return
    waited = tuple(
        report.rank
        for report in case.ranks
        if report.activity is Activity.FAILED and _in_set_up(report.error_text)
    )
    ended = tuple(report.rank for report in case.ranks if report.exit_code == 0)
    if waited and ended and len(waited) + len(ended) == case.world_size:
        yield Finding(
            Category.MISSING_RANK,
            ended,
            f"{name_ranks(ended)} ended without an error and without joining the group that "
            f"{name_ranks(waited)} waited for",
            "Call init_process_group on every rank.",
            waited,
        )


def _conditional(case: Case) -> Iterable[Finding]:
    """Collectives on whose line only some ranks come, where the others have ended without it.

    Their dumps do not show that they did not call it later; the condition in the code does.
    """
    at = {
        (record.group, record.slot)
        for report in case.ranks
        if report.activity in (Activity.WAITING, Activity.FAILED)
        for record in case.collectives.of.get(report.rank, ())[-1:]
        if not record.is_point_to_point
    }
    ended = tuple(
        replace(report, activity=Activity.IDLE, initialized=False)
        if report.exit_code == 0 and _stands_before(case, report.rank, at)
        else report
        for report in case.ranks
    )
    if ended != case.ranks:
        for finding in diagnose_run(replace(case, ranks=ended)).findings:
            if finding.category is Category.CONDITIONAL_COLLECTIVE:
                yield finding


def _stands_before(case: Case, rank: int, at: set[tuple[str, int]]) -> bool:
    """True of a rank whose records lead up to a collective in which another one was left."""
    records = case.collectives.of.get(rank, ())
    return bool(records) and (records[-1].group, records[-1].slot + 1) in at


def _in_set_up(text: str) -> bool:
    return "clients joined" in text or "default_pg/" in text


def _undecided(gathered: Gathered) -> list[Finding]:
    """Who waited, failed or was ended, where no rule says why."""
    case = gathered.case
    waited = case.where(Activity.WAITING)
    ended = [report for report in case.ranks if GOT_TOO_MUCH.search(report.last_words)]
    what = list(filter(None, [gathered.parted or _who_waited(gathered)]))
    for report in ended:
        sizes = GOT_TOO_MUCH.search(report.last_words)
        if sizes is not None:
            what.append(
                f"gloo ended rank {report.rank}, for another rank sent it {sizes[1]} bytes where "
                f"it expected {sizes[2]}"
            )
    aborted = tuple(r.rank for r in case.ranks if r.exit_code == _ABORTED and r not in ended)
    if aborted:
        what.append(f"{name_ranks(aborted)} ended by SIGABRT, which C++ code raises on an error")
    if not what:
        return []
    cause = f"{'; '.join(what)}; these files do not prove why"
    return [Finding(Category.UNDECIDED, (), cause, _MORE, waited, tuple(_facts(case)))]


def _who_waited(gathered: Gathered) -> str:
    """For whom ranks waited in vain, as far as the errors tell; empty if none did."""
    case = gathered.case
    left = tuple(sorted({*case.where(Activity.WAITING), *case.where(Activity.FAILED)}))
    missing = absent(case, gathered.connects)
    if left and missing:
        return (
            f"{name_ranks(left)} waited in set-up for {name_ranks(missing)}, which never "
            "joined, or was never started"
        )
    return (_by_errors(case, left) or f"{name_ranks(left)} waited or failed") if left else ""


def _by_errors(case: Case, left: Ranks) -> str:
    """What gloo's errors of these ranks say of the others; empty if nothing."""
    rest = tuple(report.rank for report in case.ranks if report.rank not in left)
    errors = [case.ranks[rank].error_text for rank in left]
    if not rest and all(_CLOSED in text for text in errors):
        return (
            f"{name_ranks(left)} each lost the connection to another rank, as to one that has "
            "ended; these files do not say which rank closed it first"
        )
    if rest and all(map(_TIMED_OUT.search, errors)):
        return (
            f"{name_ranks(left)} gave up waiting, {name_ranks(rest)} did not: late, elsewhere in "
            "the code, or stuck"
        )
    return ""


_CLOSED = "Connection closed by peer"
_TIMED_OUT = re.compile(r"Timed out waiting \d+ms for (send|recv) operation")

_MORE = (
    "Start the job again with DDP_NOTEBOOK=1 in its environment. When it hangs, or has ended: "
    "ddp-notebook why"
)
_MOST_FACTS = 64


def _facts(case: Case) -> Iterable[str]:
    same: dict[str, list[int]] = {}
    for report in case.ranks:
        records = case.collectives.of.get(report.rank, ())
        last = next((r for r in records if not r.over), records[-1] if records else None)
        text = _doing(report)
        if last is not None:
            at = at_place(last.place)
            text += f"; its last record is collective {last.slot}: {last.operation}{at}"
        if report.last_words:
            text += f"; its last words: {report.last_words}"
        same.setdefault(text, []).append(report.rank)
    for text, ranks in list(same.items())[:_MOST_FACTS]:
        yield f"{name_ranks(ranks)}: {text}"


def _doing(report: RankReport) -> str:
    """What a rank did last; no rank can be asked, so one without a record is not silent."""
    return report.doing if report.activity is Activity.SILENT and report.doing else doing(report)


def _all_ended_well(case: Case) -> bool:
    return bool(case.ranks) and all(report.exit_code == 0 for report in case.ranks)
