"""Why set-up does not get on: findings from the evidence of all ranks, as pure functions.

Every rule asks for proof. A rank that is slow, or a machine that is, proves nothing: what a
healthy set-up passes through on its way never gives a finding that is not `passing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ddp_notebook.diagnosis.setup import (
    argument_rules,
    data_worker_rules,
    presence_rules,
    reach_rules,
    store_rules,
)
from ddp_notebook.model import (
    Activity,
    Case,
    Diagnosis,
    Finding,
    RankReport,
    cut,
)

_ERROR_LENGTH = 160
"""How much of an error stands beside what the other ranks do."""

Rule = Callable[[Case], Iterator[Finding]]


def diagnose(case: Case) -> Diagnosis:
    """What is wrong with this set-up. Findings come in the order in which to mend them."""
    findings: list[Finding] = []
    blamed: set[int] = set()
    # A file of an earlier run is a mistake also where the run was lucky.
    lucky = any(e.arguments.stale for e in case.ranks)
    loading = any(e.workers for e in case.ranks)
    if lucky or loading or case.where(Activity.WAITING, Activity.FAILED):
        for rule in RULES:
            for finding in rule(case):
                # What a rank does wrong first explains what goes wrong with it later.
                # One that is nobody's doing is explained by no rank.
                explained = bool(finding.ranks) and set(finding.ranks) <= blamed
                if finding.passing or not explained:
                    findings.append(finding)
                    blamed.update(() if finding.passing else finding.ranks)
    if any(not finding.passing for finding in findings):
        findings.sort(key=lambda finding: finding.passing)
    return Diagnosis(tuple(findings), {e.rank: doing(e) for e in case.ranks}, case.world_size)


def doing(evidence: RankReport) -> str:
    """What a rank does, for a person."""
    match evidence.activity:
        case Activity.WAITING:
            said = evidence.doing.removeprefix(f"{evidence.inside}: ")
            place = f" ({said})" if said else ""
            return f"waits in {evidence.inside}{place}"
        case Activity.BUSY if evidence.workers:
            return f"waits for a batch of its DataLoader ({evidence.doing})"
        case Activity.BUSY:
            return f"busy: {evidence.doing}" if evidence.doing else "busy"
        case Activity.HELD:
            return f"paused {evidence.doing}" if evidence.doing else "paused (by %ddp_step)"
        case Activity.FAILED:
            first = evidence.error_text.strip().splitlines()
            error = first[0] if first else evidence.error_type
            return f"failed: {cut(error, _ERROR_LENGTH)}"
        case Activity.DEAD:
            return "its process is gone"
        case Activity.IDLE:
            return "runs nothing"
        case _:
            return f"does not answer ({evidence.doing})" if evidence.doing else "does not answer"


RULES: tuple[Rule, ...] = (
    argument_rules.invalid_values,
    argument_rules.differing_values,
    argument_rules.duplicate_ranks,
    argument_rules.wrong_world_size,
    store_rules.stale_files,
    reach_rules.loopback_listeners,
    presence_rules.raised,
    presence_rules.dead_ranks,
    presence_rules.stopped_ranks,
    data_worker_rules.stuck_loaders,
    store_rules.unreachable_store,
    reach_rules.blocked_ranks,
    argument_rules.differing_models,
    presence_rules.absent_ranks,
    presence_rules.early_exits,
    presence_rules.polling_ranks,
    argument_rules.other_versions,
    presence_rules.late_ranks,
)
"""In the order in which mistakes should be mended."""
