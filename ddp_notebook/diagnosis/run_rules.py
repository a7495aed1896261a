"""What is wrong with a run: the rules of set-up and those of collectives, in one order.

What happened first comes first. What an earlier finding explains is left out: the ranks that a
mistake drags along, and what the culprits do wrong afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ddp_notebook.diagnosis import hang_rules, setup_rules
from ddp_notebook.diagnosis.collectives import exit_rules
from ddp_notebook.diagnosis.collectives import rules as collective_rules
from ddp_notebook.diagnosis.collectives.source_code import Sources
from ddp_notebook.diagnosis.collectives.wait_graph import in_new_group
from ddp_notebook.diagnosis.context import Picture
from ddp_notebook.diagnosis.setup import (
    argument_rules,
    data_worker_rules,
    presence_rules,
    store_rules,
)
from ddp_notebook.diagnosis.setup_rules import Rule
from ddp_notebook.model import Activity, Case, Category, Diagnosis, Finding


def diagnose_run(case: Case, sources: Mapping[str, str] | None = None) -> Diagnosis:
    """What is wrong with this run, in the order in which to mend it.

    `sources` has the text of the user's files and cells by the names that places have: with it
    conditions and loops are known, without it some answers are less sure. A case in which no
    rank issued anything is one of set-up, and gets what `setup_rules.diagnose` says.
    """
    if not any(case.collectives.of.values()) and not any(map(in_new_group, case.ranks)):
        return setup_rules.diagnose(case)
    picture = Picture(case, Sources(case.sources if sources is None else sources))
    findings: list[Finding] = []
    blamed: set[int] = set()
    for finding in _candidates(picture):
        if not finding.passing and finding.ranks and set(finding.ranks) <= blamed:
            continue
        if any(f.category is finding.category and f.ranks == finding.ranks for f in findings):
            continue
        findings.append(finding)
        if not finding.passing:
            blamed.update(finding.ranks)
    findings = _without_consequences(findings)
    if any(not finding.passing for finding in findings):
        findings.sort(key=lambda finding: finding.passing)
    doing = {e.rank: setup_rules.doing(e) for e in case.ranks}
    return Diagnosis(tuple(findings), doing, case.world_size)


def _candidates(picture: Picture) -> Iterator[Finding]:
    case = picture.case
    in_setup = bool(case.where(Activity.WAITING, Activity.FAILED))
    # A file of an earlier run is a mistake also where the run was lucky.
    if in_setup or any(e.arguments.stale for e in case.ranks):
        yield from _each(case, SETUP_FIRST)
    yield from presence_rules.stopped_ranks(case)
    yield from hang_rules.unreduced_gradients(case)
    yield from collective_rules.certain_rules(picture)
    yield from exit_rules.ended(picture, collective_rules.hurt(picture))
    yield from data_worker_rules.stuck_loaders(case)
    if not picture.interrupted:
        yield from collective_rules.stuck_rules(picture)
    yield from collective_rules.stragglers(picture)
    if in_setup and not picture.interrupted:
        yield from _each(case, SETUP_LAST)
    if not picture.graph.at.keys() >= set(case.waiting):
        yield from presence_rules.late_ranks(case)  # of those that wait in set-up


def _each(case: Case, rules: tuple[Rule, ...]) -> Iterator[Finding]:
    for rule in rules:
        yield from rule(case)


def _without_consequences(findings: list[Finding]) -> list[Finding]:
    """Without findings of the vaguer kind where a more exact one is there."""
    exact = any(not f.passing and f.category not in _VAGUE for f in findings)
    return [f for f in findings if f.passing or not exact or f.category not in _VAGUE]


_VAGUE = (Category.EARLY_EXIT, Category.MISSING_DESTROY, Category.MISSING_RANK)
"""That a rank is not there is what a mistake looks like from afar."""

SETUP_FIRST: tuple[Rule, ...] = (
    argument_rules.invalid_values,
    argument_rules.differing_values,
    argument_rules.duplicate_ranks,
    argument_rules.wrong_world_size,
    store_rules.stale_files,
    argument_rules.differing_models,
)
"""Mistakes in what the ranks came with: they precede whatever a run does."""

SETUP_LAST: tuple[Rule, ...] = (
    store_rules.unreachable_store,
    presence_rules.absent_ranks,
    presence_rules.polling_ranks,
    argument_rules.other_versions,
)
