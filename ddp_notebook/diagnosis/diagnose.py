"""The table of all rules, in order: what is wrong with a set-up, a run, or its training.

What happened first comes first. What an earlier finding explains is left out: the ranks that a
mistake drags along, and what its culprits do wrong afterwards.

A rule asks for proof. A rank that is slow, or a machine that is, proves nothing: what a healthy
job passes through on its way gives at most a finding that is `passing`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, Flag, auto
from pathlib import Path
from traceback import extract_tb

from ddp_notebook.diagnosis import failures, files
from ddp_notebook.diagnosis.collectives import (
    exits,
    groups,
    hang,
    out_of_step,
    p2p,
    schedules,
    sharding,
    splits,
    stopped_short,
)
from ddp_notebook.diagnosis.collectives.describe import with_purposes
from ddp_notebook.diagnosis.collectives.meshes import mesh_of
from ddp_notebook.diagnosis.collectives.wait_graph import in_new_group
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.deaths import deaths
from ddp_notebook.diagnosis.progress import doing
from ddp_notebook.diagnosis.setup import arguments, data_workers, missing_ranks, reach, store
from ddp_notebook.diagnosis.source_code.sources import Sources
from ddp_notebook.diagnosis.training import coverage, equal, steps
from ddp_notebook.model import (
    Activity,
    Case,
    Category,
    Collectives,
    Diagnosis,
    Finding,
    RankReport,
    Ranks,
    RunFacts,
    cut,
    name_ranks,
    parse_ranks,
    said_by,
)


class When(Flag):
    """The situations in which a rule applies."""

    SETUP = auto()
    """No rank has issued a collective."""
    RUN = auto()
    """Ranks have issued collectives."""
    RUN_BLOCKED = auto()
    """Such a run in which a rank waits or has failed."""
    RUN_STUCK = auto()
    """A blocked run that the user did not interrupt: what ranks wait for proves something."""
    ENDED = auto()
    """A run that ended well on all ranks."""


class Explains(Enum):
    """What a finding explains: later findings of that are left out."""

    CULPRITS = "whatever its culprits do wrong afterwards"
    MESSAGES = "that messages of a pipeline do not meet, and what its culprits do wrong afterwards"
    STRAYING = "that ranks wait elsewhere for its culprits, and what these do wrong afterwards"
    DRIFT = "that replicas have drifted apart"
    NOTHING = "nothing else"


_BLAMING = (Explains.CULPRITS, Explains.MESSAGES, Explains.STRAYING)


@dataclass(frozen=True)
class Rule:
    """A row of the table: what to look for, when, and what its findings explain.

    With `unless`, the rule is left out once a finding explains that.
    """

    find: Callable[[Context], Iterable[Finding]]
    when: When
    explains: Explains = Explains.CULPRITS
    unless: Explains | None = None


RULES: tuple[Rule, ...] = (
    # What ranks gave to init_process_group: such a mistake precedes whatever a run does.
    Rule(arguments.invalid_values, When.SETUP | When.RUN_BLOCKED),
    Rule(arguments.other_versions, When.SETUP),
    Rule(arguments.differing_values, When.SETUP | When.RUN_BLOCKED),
    Rule(arguments.duplicate_ranks, When.SETUP | When.RUN_BLOCKED),
    Rule(arguments.wrong_world_size, When.SETUP | When.RUN_BLOCKED),
    Rule(store.stale_files, When.SETUP | When.RUN_BLOCKED),
    Rule(store.missing_folders, When.SETUP | When.RUN_STUCK),
    Rule(store.opened_twice, When.SETUP | When.RUN_BLOCKED),
    Rule(arguments.differing_models, When.SETUP | When.RUN_BLOCKED),
    Rule(reach.loopback_listeners, When.SETUP),
    # Ranks that ended, or were stopped, before anything else went wrong.
    Rule(missing_ranks.raised, When.SETUP),
    Rule(missing_ranks.dead_ranks, When.SETUP),
    Rule(missing_ranks.came_too_late, When.SETUP),
    Rule(missing_ranks.stopped_ranks, When.SETUP | When.RUN),
    # Collectives that met and do not match are proof, whether ranks are stuck or not.
    Rule(hang.unreduced_gradients, When.RUN),
    Rule(files.lost_store_file, When.SETUP | When.RUN_BLOCKED),
    Rule(groups.other_groups, When.SETUP | When.RUN_BLOCKED),
    Rule(sharding.other_wrapping, When.RUN_BLOCKED),
    Rule(sharding.other_frozen, When.RUN_BLOCKED),
    Rule(splits.split_mismatch, When.RUN),
    Rule(schedules.other_schedules, When.RUN_BLOCKED, Explains.MESSAGES),
    Rule(exits.unwinding, When.RUN_STUCK, Explains.STRAYING),
    Rule(groups.parted_over_groups, When.RUN_STUCK),
    Rule(out_of_step.conflicts, When.RUN),
    Rule(p2p.unequal_messages, When.RUN, unless=Explains.MESSAGES),
    Rule(files.raced_paths, When.RUN_BLOCKED),
    Rule(exits.ended, When.RUN),
    Rule(data_workers.stuck_data_workers, When.SETUP | When.RUN),
    # Only that ranks are stuck proves that these are mistakes.
    Rule(store.unset_keys, When.SETUP | When.RUN_STUCK),
    Rule(out_of_step.out_of_step, When.RUN_STUCK),
    Rule(stopped_short.stopped_short, When.RUN_STUCK),
    Rule(p2p.unmatched_messages, When.RUN_STUCK, unless=Explains.MESSAGES),
    Rule(groups.new_group_not_by_all, When.RUN_STUCK),
    Rule(groups.opposite_groups, When.RUN_STUCK),
    Rule(out_of_step.came_too_late, When.RUN_BLOCKED),
    Rule(out_of_step.stragglers, When.RUN),
    # Ranks that wait in set-up, and those that they wait for.
    Rule(store.unreachable_store, When.SETUP | When.RUN_STUCK),
    Rule(reach.blocked_ranks, When.SETUP),
    Rule(missing_ranks.absent_ranks, When.SETUP | When.RUN_STUCK),
    Rule(store.store_host_left, When.SETUP | When.RUN_STUCK),
    Rule(missing_ranks.early_exits, When.SETUP),
    Rule(missing_ranks.polling_ranks, When.SETUP | When.RUN_STUCK),
    Rule(arguments.other_versions, When.RUN_STUCK),
    Rule(missing_ranks.late_ranks, When.SETUP | When.RUN),
    # Runs that ended well and computed something else than was meant.
    Rule(steps.shared_gpus, When.ENDED, Explains.NOTHING),
    Rule(steps.backends, When.ENDED, Explains.NOTHING),
    Rule(steps.unwaited, When.ENDED, Explains.DRIFT),
    Rule(coverage.detached_optimizers, When.ENDED, Explains.NOTHING),
    Rule(coverage.unheld_parameters, When.ENDED, Explains.NOTHING),
    Rule(coverage.unused_parameters, When.ENDED, Explains.DRIFT),
    Rule(coverage.module_bypass, When.ENDED, Explains.DRIFT),
    Rule(coverage.no_sync, When.ENDED, Explains.DRIFT),
    Rule(coverage.unwrapped_parameters, When.ENDED, Explains.DRIFT),
    Rule(steps.first_nan, When.ENDED, Explains.DRIFT),
    Rule(equal.learning_rates, When.ENDED, Explains.DRIFT),
    Rule(equal.other_inputs, When.ENDED, Explains.DRIFT),
    Rule(coverage.kept_back, When.ENDED, Explains.DRIFT),
    Rule(steps.local_factors, When.ENDED, Explains.DRIFT),
    Rule(equal.other_draws, When.ENDED, Explains.DRIFT, unless=Explains.DRIFT),
    Rule(steps.clipped_apart, When.ENDED, Explains.NOTHING),
    Rule(equal.other_precision, When.ENDED, Explains.NOTHING),
    Rule(equal.buffers, When.ENDED, Explains.NOTHING),
    Rule(equal.sampler_misuse, When.ENDED, Explains.NOTHING),
    Rule(equal.same_batches, When.ENDED, Explains.NOTHING),
    Rule(equal.same_draws, When.ENDED, Explains.NOTHING),
    Rule(equal.other_statistics, When.ENDED, Explains.NOTHING),
    Rule(steps.unjoined_results, When.ENDED, Explains.NOTHING),
    Rule(coverage.untied, When.ENDED, Explains.NOTHING),
    Rule(steps.loaded_on_some, When.ENDED, Explains.DRIFT, unless=Explains.DRIFT),
    Rule(steps.diverged_replicas, When.ENDED, Explains.NOTHING, unless=Explains.DRIFT),
)
"""In the order in which mistakes should be corrected."""

_MOST_RANKS = 1 << 20
_LONGEST_ERROR = 200
_MOST_PLACED = 4
"""Of so many culprits the coordinates in the mesh are told."""

_VAGUE = (Category.EARLY_EXIT, Category.MISSING_DESTROY, Category.MISSING_RANK)
"""That a rank is missing is how many mistakes look: in a run, a more exact finding replaces it."""


def diagnose_run(case: Case, sources: Mapping[str, str] | None = None) -> Diagnosis:
    """What is wrong with a run, in the order in which to correct it.

    `sources` has the text of the user's files and cells by the names that places have, by
    default those of the case: with it conditions and loops are known, without it some answers
    are less sure. While no rank has issued anything, it is set-up that is judged.
    """
    if not any(case.collectives.of.values()) and not any(map(in_new_group, case.ranks)):
        return diagnose_setup(case, sources)
    case = with_purposes(case)
    context = Context(case, _sources(case, sources))
    findings, notes = _findings(context, _of_run(context))
    if any(not finding.passing and finding.category not in _VAGUE for finding in findings):
        findings = [f for f in findings if f.passing or f.category not in _VAGUE]
    return _diagnosis(case, findings, notes)


def diagnose_setup(case: Case, sources: Mapping[str, str] | None = None) -> Diagnosis:
    """What is wrong with a set-up, in the order in which to correct it.

    `sources` are as in `diagnose_run`.
    """
    waits = any(map(_waits_for_its_own, case.ranks))
    if waits or _is_stale(case) or case.where(Activity.WAITING, Activity.FAILED):
        context = Context(case, _sources(case, sources))
        return _diagnosis(case, *_findings(context, When.SETUP))
    # No rank waits for it, but it is gone, or stopped. A script's process may end with code 0.
    gone = [report for report in case.ranks if report.activity is Activity.DEAD]
    died = [e for e in gone if e.exit_code or (e.exit_code == 0 and not case.script)]
    stopped = missing_ranks.stopped_ranks(Context(case))
    return _diagnosis(case, [*deaths(case, died, ()), *stopped], [])


def _sources(case: Case, sources: Mapping[str, str] | None) -> Sources:
    return Sources(case.sources if sources is None else sources, case.files_seen)


def _waits_for_its_own(report: RankReport) -> bool:
    return bool(report.workers)


def diagnose_training(
    facts: Mapping[int, RunFacts],
    collectives: Collectives,
    sources: Mapping[str, str] | None = None,
) -> Diagnosis:
    """What is wrong with the training of a run that ended well, by what each rank knows of it.

    `sources` has the text of the user's files and cells by the names that places have.
    """
    if len(facts) < 2:
        return Diagnosis()
    case = Case((), collectives=collectives)
    optimizers = (optimizer for of in facts.values() for optimizer in of.optimizers)
    seen = {*case.files_seen, *(each.place.file for each in optimizers if each.place)}
    context = Context(case, Sources(sources, seen), facts)
    findings, notes = _findings(context, When.ENDED)
    if any((of.broken or of.unrecorded) and not of.collectives for of in facts.values()):
        findings = []  # that ranks exchanged nothing may only seem so
    if broken := {rank: cut(of.broken, _LONGEST_ERROR) for rank, of in facts.items() if of.broken}:
        notes.append(
            "What this run trained is known in part only: counting failed, and stops until the "
            f"ranks restart ({said_by(broken)}): please report this."
        )
    notes += _unrecorded({rank: of.unrecorded for rank, of in facts.items()})
    return Diagnosis(tuple(folded(findings)), None, len(facts), notes=tuple(notes))


def _of_run(context: Context) -> When:
    """The situations of a run in which ranks have issued collectives."""
    when = When.RUN
    blocked = bool(context.case.where(Activity.WAITING, Activity.FAILED))
    if blocked or _is_stale(context.case):
        when |= When.RUN_BLOCKED
    if blocked and not context.interrupted:
        when |= When.RUN_STUCK
    return when


def _is_stale(case: Case) -> bool:
    """A file of an earlier run is a mistake also where the run was lucky."""
    return any(report.arguments.stale for report in case.ranks)


def _findings(context: Context, when: When) -> tuple[list[Finding], list[str]]:
    """What the rules for these situations find, without what other findings explain; and notes."""
    findings: list[Finding] = []
    notes: list[str] = []
    blamed: set[int] = set()
    explained: set[Explains] = set()
    for rule in RULES:
        if not rule.when & when or rule.unless in explained:
            continue
        new = []
        for finding in _found_by(rule, context, notes):
            if _follows(finding, findings, blamed):
                continue
            new.append(finding)
            findings.append(finding)
            explained.add(rule.explains)
            if rule.explains in _BLAMING and not finding.passing:
                blamed.update(finding.ranks)
        blamed.update(_waiting_elsewhere(rule, new))
    return findings, notes


def _waiting_elsewhere(rule: Rule, found: Iterable[Finding]) -> set[int]:
    """The ranks that seem to stray as others did, by what the rule found."""
    straying = rule.explains is Explains.STRAYING
    return {rank for finding in found for rank in finding.waiting} if straying else set()


def _found_by(rule: Rule, context: Context, notes: list[str]) -> list[Finding]:
    """What a rule finds. An error of its own is noted: the others have their say all the same."""
    findings: list[Finding] = []
    try:
        findings.extend(rule.find(context))
    except Exception as error:  # noqa: BLE001  # ours to solve, not the user's
        where = extract_tb(error.__traceback__)[-1]
        text = cut(" ".join(f"{type(error).__name__}: {error}".split()), _LONGEST_ERROR)
        notes.append(
            f"The rule {rule.find.__name__} failed on this record, so what it looks for is not "
            f"known ({text}, {Path(where.filename).name}:{where.lineno}): please report this."
        )
    return findings


def _follows(finding: Finding, findings: list[Finding], blamed: set[int]) -> bool:
    """True when `finding` follows from earlier ones, whose culprits are `blamed`.

    One that has no culprit, or that passes, is only left out when it is there already.
    """
    if finding.passing or not finding.ranks:
        return any((f.category, f.ranks) == (finding.category, finding.ranks) for f in findings)
    return blamed.issuperset(finding.ranks)


def _diagnosis(case: Case, findings: list[Finding], notes: Sequence[str]) -> Diagnosis:
    """The diagnosis, with what passes by itself after what does not."""
    findings = folded(sorted(findings, key=lambda finding: finding.passing))
    findings = [_with_coordinates(case, finding) for finding in findings]
    return Diagnosis(
        tuple(findings),
        {e.rank: doing(e) for e in case.ranks},
        case.world_size,
        unsure="" if findings else failures.unsure(case, {}, "", ()),
        notes=(*notes, *_unrecorded({e.rank: e.unrecorded for e in case.ranks})),
        remarks=case.remarks,
    )


def _unrecorded(why: Mapping[int, str]) -> list[str]:
    """Says which ranks' collectives are not recorded; `why` has the reason of each, or nothing."""
    known = {rank: cut(text, _LONGEST_ERROR) for rank, text in why.items() if text}
    if not known:
        return []
    return [
        f"Collectives of {name_ranks(known)} are not recorded ({said_by(known)}), so it is not "
        "known whether they match. A process that starts once that is changed records them."
    ]


def _with_coordinates(case: Case, finding: Finding) -> Finding:
    """`finding`, with where its culprits are in the mesh, if they are few."""
    few = finding.ranks if len(finding.ranks) <= _MOST_PLACED else ()
    mesh = mesh_of(case) if few and finding.category is not Category.MESH_MISMATCH else None
    if mesh is None:
        return finding
    return replace(finding, evidence=(*finding.evidence, *mesh.lines(few)))


def folded(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that say the same of several ranks as one of all of them."""
    same: dict[tuple[Category, str, str, bool], Finding] = {}
    for finding in findings:
        key = finding.category, finding.cause, finding.remedy, finding.passing
        first = same.get(key)
        same[key] = finding if first is None else _joined(first, finding)
    return list(same.values())


def _joined(one: Finding, other: Finding) -> Finding:
    return replace(
        one,
        ranks=tuple(sorted({*one.ranks, *other.ranks})),
        waiting=tuple(sorted({*one.waiting, *other.waiting})),
        evidence=_alike((*one.evidence, *other.evidence)),
    )


def _alike(evidence: Iterable[str]) -> tuple[str, ...]:
    """Lines of evidence, those that say the same of several ranks as one."""
    ranks: dict[str, set[int]] = {}
    for line in evidence:
        who, text = _whose(line)
        members = ranks.setdefault(text, set())
        members.update(who)
    return tuple(
        f"{name_ranks(members)}{text}" if members else text for text, members in ranks.items()
    )


_OF_RANKS = re.compile(r"ranks? ([\d,-]+)(?=[:, ])", re.ASCII)


def _whose(line: str) -> tuple[Ranks, str]:
    """The ranks that a line begins with, and the rest of it; none where it begins otherwise."""
    who = _OF_RANKS.match(line)
    try:
        ranks = parse_ranks(who[1], _MOST_RANKS) if who else ()
    except ValueError:  # a message of the user's own may begin like this
        ranks = ()
    return ranks, line[who.end() :] if who and ranks else line
