"""The engine: which rules look at a setup, a run or its training, and which finding is the first.

Every rule is asked, and each finding is made by its rule alone. Then they are put in the order of
their priorities: what went wrong earliest is the finding, and what follows from it is left out,
such as the ranks that a mistake drags along, and what its culprits do wrong afterwards.

A rule asks for proof. A rank that is slow, or a machine that is, proves nothing: what a healthy
job passes through on its way gives at most a finding that is `passing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum, auto
from pathlib import Path
from traceback import extract_tb
from typing import TypeAlias

from ddp_notebook.diagnosis import catalogue, failures, files
from ddp_notebook.diagnosis.collectives import exits, groups, out_of_step, p2p, split_models
from ddp_notebook.diagnosis.collectives.describe import with_purposes
from ddp_notebook.diagnosis.collectives.meshes import mesh_of
from ddp_notebook.diagnosis.collectives.wait_graph import in_new_group
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.deaths import deaths
from ddp_notebook.diagnosis.progress import doing
from ddp_notebook.diagnosis.setup import arguments, missing_ranks, store
from ddp_notebook.diagnosis.sides import with_sides
from ddp_notebook.diagnosis.source_code.sources import Sources
from ddp_notebook.diagnosis.training import coverage, equal, steps
from ddp_notebook.model import (
    Activity,
    Case,
    Category,
    Collectives,
    Diagnosis,
    Finding,
    RunFacts,
    cut,
    said_by,
)


class Priority(IntEnum):
    """How early a mistake is, and what it explains: of two findings the lower one is the cause.

    A finding explains what its culprits do wrong at a later priority. Three explain in another
    way, and `_is_consequence` is where that is written.
    """

    GIVEN = auto()
    """Input of ranks to torch: arguments, stores, groups, models. It precedes whatever they do."""
    GONE = auto()
    """Ranks that ended, or were stopped, before anything else went wrong."""
    UNWINDING = auto()
    """A rank that raised is on its way out: its peers seem to diverge, so they are explained."""
    MET = auto()
    """Calls that met and do not match, and ranks that ended: proof, whether ranks wait or not."""
    STUCK = auto()
    """Ranks wait for what can no longer come: only that proves that these are mistakes."""
    ABSENT = auto()
    """A rank is missing, which is how many mistakes look: said where there is nothing else."""
    LATE = auto()
    """A state that may pass by itself: a rank that is late, but works."""
    MADE = auto()
    """After a run that ended well: what was made for its training does not fit together."""
    CAUSE = auto()
    """The reason for which replicas drift apart."""
    RESULT = auto()
    """Numbers that are not what was meant."""
    DRIFT = auto()
    """Replicas have drifted apart: said where no cause is known, and once."""


Rule: TypeAlias = Callable[[Context], Iterable[Finding]]
Rules: TypeAlias = Mapping[Priority, tuple[Rule, ...]]

_IN_BOTH = (
    arguments.differing_values,
    arguments.duplicate_ranks,
    arguments.wrong_world_size,
    store.stale_files,
    store.missing_folders,
    store.opened_twice,
    arguments.differing_models,
    files.lost_store_file,
    groups.other_groups,
)
"""Rules about what ranks gave to torch, in setup and afterwards."""

SETUP: Rules = {
    Priority.GIVEN: (
        arguments.invalid_values,
        arguments.other_versions,
        *_IN_BOTH,
        store.loopback_listeners,
    ),
    Priority.GONE: (
        missing_ranks.raised,
        missing_ranks.dead_ranks,
        missing_ranks.came_too_late,
        missing_ranks.stopped_ranks,
        missing_ranks.stuck_data_workers,
    ),
    Priority.STUCK: (
        store.unset_keys,
        store.unreachable_store,
        store.blocked_ranks,
        missing_ranks.absent_ranks,
        store.store_host_left,
        missing_ranks.early_exits,
        missing_ranks.polling_ranks,
    ),
    Priority.LATE: (missing_ranks.late_ranks,),
}
"""While no rank has issued a collective."""

RUN: Rules = {
    Priority.GIVEN: (
        arguments.invalid_values,
        *_IN_BOTH,
        split_models.other_wrapping,
        split_models.other_frozen,
        split_models.other_schedules,
        files.raced_paths,
    ),
    Priority.GONE: (missing_ranks.stopped_ranks,),
    Priority.UNWINDING: (files.missed_paths, exits.unwinding),
    Priority.MET: (
        out_of_step.unreduced_gradients,
        split_models.split_mismatch,
        groups.parted_over_groups,
        out_of_step.conflicts,
        p2p.unequal_messages,
        exits.ended,
        exits.raised_alike,
        missing_ranks.stuck_data_workers,
    ),
    Priority.STUCK: (
        store.unset_keys,
        out_of_step.out_of_step,
        out_of_step.stopped_short,
        p2p.unmatched_messages,
        groups.new_group_not_by_all,
        groups.opposite_groups,
        out_of_step.came_too_late,
        store.unreachable_store,
        missing_ranks.absent_ranks,
        store.store_host_left,
        missing_ranks.polling_ranks,
        arguments.other_versions,
    ),
    Priority.LATE: (out_of_step.stragglers, missing_ranks.late_ranks),
}
"""Once ranks have issued collectives."""

TRAINING: Rules = {
    Priority.MADE: (
        steps.shared_gpus,
        steps.backends,
        coverage.detached_optimizers,
        coverage.unheld_parameters,
    ),
    Priority.CAUSE: (
        steps.unwaited,
        coverage.unused_parameters,
        coverage.module_bypass,
        coverage.no_sync,
        coverage.unwrapped_parameters,
        steps.first_nan,
        equal.learning_rates,
        equal.other_inputs,
        coverage.kept_back,
        steps.local_factors,
    ),
    Priority.RESULT: (
        steps.clipped_apart,
        equal.other_precision,
        equal.buffers,
        equal.sampler_misuse,
        equal.same_batches,
        equal.same_draws,
        equal.other_statistics,
        steps.unjoined_results,
        coverage.untied,
    ),
    Priority.DRIFT: (equal.other_draws, steps.loaded_on_some, steps.diverged_replicas),
}
"""Rules for a run that ended well on all ranks, and computed something else than was meant."""

_MISSING = (Category.EARLY_EXIT, Category.MISSING_DESTROY, Category.MISSING_RANK)
_LONGEST_ERROR = 200


def diagnose_run(case: Case, sources: Mapping[str, str] | None = None) -> Diagnosis:
    """Return what is wrong with a run, in the order in which to correct it.

    `sources` has the text of the user's files and cells by the names that places have, by
    default those of the case: with it conditions and loops are known, without it some answers
    are less sure. While no rank has issued anything, it is setup that is judged.
    """
    if not any(case.collectives.of.values()) and not any(map(in_new_group, case.ranks)):
        return diagnose_setup(case, sources)
    case = with_purposes(case)
    context = Context(case, _sources(case, sources))
    blocked = bool(case.where(Activity.WAITING, Activity.FAILED))
    priorities = {Priority.GONE, Priority.MET, Priority.LATE}
    if blocked or _is_stale(case):
        priorities.add(Priority.GIVEN)
    # What ranks wait for proves something only as long as the user has not interrupted them.
    if blocked and not context.interrupted:
        priorities |= {Priority.UNWINDING, Priority.STUCK}
    rules = {priority: of for priority, of in RUN.items() if priority in priorities}
    return _diagnosis(case, *_findings(context, rules))


def diagnose_setup(case: Case, sources: Mapping[str, str] | None = None) -> Diagnosis:
    """Return what is wrong with a setup, in the order in which to correct it.

    `sources` are as in `diagnose_run`.
    """
    waits = any(report.awaits.workers for report in case.ranks)
    if waits or _is_stale(case) or case.where(Activity.WAITING, Activity.FAILED):
        context = Context(case, _sources(case, sources))
        return _diagnosis(case, *_findings(context, SETUP))
    # No rank waits for it, but it is gone, or stopped. A script's process may end with code 0.
    gone = [report for report in case.ranks if report.activity is Activity.DEAD]
    died = [e for e in gone if e.end.code or (e.end.code == 0 and not case.script)]
    stopped = missing_ranks.stopped_ranks(Context(case))
    return _diagnosis(case, [*deaths(case, died, ()), *stopped], [])


def _sources(case: Case, sources: Mapping[str, str] | None) -> Sources:
    return Sources(case.sources if sources is None else sources, case.files_seen)


def diagnose_training(
    facts: Mapping[int, RunFacts],
    collectives: Collectives,
    sources: Mapping[str, str] | None = None,
) -> Diagnosis:
    """Return what is wrong with the training of a run that ended well, by what each rank knows.

    `sources` has the text of the user's files and cells by the names that places have.
    """
    if len(facts) < 2:
        return Diagnosis()
    case = Case((), collectives=collectives)
    of_optimizers = (each.place for of in facts.values() for each in of.optimizers if each.place)
    seen = {*case.files_seen, *(place.file for place in of_optimizers)}
    context = Context(case, Sources(sources, seen), facts)
    findings, notes = _findings(context, TRAINING)
    broken = {rank: cut(of.broken, _LONGEST_ERROR) for rank, of in facts.items() if of.broken}
    unrecorded = {rank: of.unrecorded for rank, of in facts.items() if of.unrecorded}
    if not all(facts[rank].collectives for rank in (*broken, *unrecorded)):
        findings = []  # that ranks exchanged nothing may only seem so
    if broken:
        notes.append(catalogue.words("remarks.note.training-unknown", errors=said_by(broken)))
    notes += _unrecorded(unrecorded)
    return Diagnosis(tuple(findings), None, len(facts), notes=tuple(notes))


def _is_stale(case: Case) -> bool:
    """A file of an earlier run is a mistake also where the run was lucky."""
    return any(report.arguments.stale for report in case.ranks)


def _findings(context: Context, rules: Rules) -> tuple[list[Finding], list[str]]:
    """Return what these rules find, the earliest mistake first, without its consequences; notes."""
    notes: list[str] = []
    # All are asked, also where an early one has found something: a rule that fails must be known,
    # and an exact finding of a late rule replaces an earlier one that only says who is missing.
    # How early a finding is depends on what it says and not on who says it: any rule may come to
    # nothing more exact than "this rank is not there". That is how most mistakes look once a rank
    # has ended of them, so it explains none.
    made: list[tuple[Priority, Finding]] = []
    for priority, of_priority in rules.items():
        for rule in of_priority:
            findings: list[Finding] = []
            try:
                findings.extend(rule(context))
            except Exception as error:  # noqa: BLE001  # ours to solve, not the user's
                # It is noted, and the others have their say all the same.
                notes.append(
                    catalogue.words(
                        "remarks.note.rule-failed",
                        rule=rule.__name__,
                        error=_failure(error),
                    )
                )
            for finding in findings:
                if finding.passing:
                    made.append((Priority.LATE, finding))
                elif finding.category in _MISSING:
                    made.append((Priority.ABSENT, finding))
                else:
                    made.append((priority, finding))
    first: list[tuple[Priority, Finding]] = []
    for priority, finding in sorted(made, key=lambda each: each[0]):
        if not _is_consequence(priority, finding, first):
            first.append((priority, finding))
    return _shown(context, [finding for _, finding in first], notes), notes


def _shown(context: Context, findings: Iterable[Finding], notes: list[str]) -> list[Finding]:
    """Return the findings with the lines where their ranks are; notes what failed in that."""
    shown = []
    for finding in findings:
        try:
            shown.append(with_sides(context, finding))
        except Exception as error:  # noqa: BLE001  # ours as well: the finding holds without it
            shown.append(finding)
            notes.append(catalogue.words("remarks.note.no-lines", error=_failure(error)))
    return shown


def _failure(error: Exception) -> str:
    """Say what failed in our own code, and where."""
    where = extract_tb(error.__traceback__)[-1]
    text = cut(" ".join(f"{type(error).__name__}: {error}".split()), _LONGEST_ERROR)
    return f"{text}, {Path(where.filename).name}:{where.lineno}"


def _is_consequence(
    priority: Priority, finding: Finding, first: Sequence[tuple[Priority, Finding]]
) -> bool:
    """True when a finding follows from earlier ones: what is left is what to correct.

    One without a culprit, or that passes, is only left out when it is there already. Training that
    ended well is judged by other facts for each mistake: there only drift has a cause.
    """
    # Why not by time: records of hosts have clocks of their own, and the mistake that made a rank
    # diverge mostly left no record at all. Why not by rank alone: a rank that raised and calls a
    # barrier in its `finally` makes its peers look as if they strayed, though they are elsewhere.
    if finding.passing or not finding.ranks:
        return any((f.category, f.ranks) == (finding.category, finding.ranks) for _, f in first)
    if priority is Priority.DRIFT:
        return any(earlier in (Priority.CAUSE, Priority.DRIFT) for earlier, _ in first)
    if priority >= Priority.MADE:
        return False
    if priority is Priority.ABSENT and any(earlier < priority for earlier, _ in first):
        return True
    explained: set[int] = set()
    for earlier, cause in first:
        explained.update(cause.ranks)
        if earlier is Priority.UNWINDING and priority is not earlier:
            explained.update(cause.waiting)
    return explained.issuperset(finding.ranks)


def _diagnosis(case: Case, findings: list[Finding], notes: Sequence[str]) -> Diagnosis:
    mesh = mesh_of(case) if findings else None
    if mesh is not None:  # up to four culprits are shown with their places in the mesh
        findings = [
            replace(f, evidence=(*f.evidence, *mesh.lines(f.ranks)))
            if len(f.ranks) <= 4 and f.category is not Category.MESH_MISMATCH
            else f
            for f in findings
        ]
    return Diagnosis(
        tuple(findings),
        {e.rank: doing(e) for e in case.ranks},
        case.world_size,
        unsure="" if findings else failures.unsure(case, {}, "", ()),
        notes=(*notes, *_unrecorded({e.rank: e.unrecorded for e in case.ranks})),
        remarks=case.remarks,
    )


def _unrecorded(why: Mapping[int, str]) -> list[str]:
    """Return which ranks' collectives are not recorded; `why` has each one's reason, if any."""
    known = {rank: cut(text, _LONGEST_ERROR) for rank, text in why.items() if text}
    if not known:
        return []
    return [catalogue.words("remarks.note.unrecorded", unrecorded=tuple(known), why=said_by(known))]
