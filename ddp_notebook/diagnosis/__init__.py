"""Derives findings (what is wrong, and the culprits) from all ranks' reports. Pure functions.

catalogue.py  The words of findings, from a file for each category in messages/; its page.
context.py    The rules' input: all ranks' reports, and what is derived from them once.
deaths.py     Ranks whose process ended: how, the known cause, and how to replace them.
diagnose.py   The table of all rules, in order: what is wrong with a setup, a run, or its training.
error_texts.py  Texts of torch, gloo, NCCL and torchrun: their meanings, and what can cause them.
failures.py   Errors of ranks, and what ranks wait in, if no other rule explains them.
files.py      Rules about files: paths that ranks change under each other, a store's file.
majority.py   Majority votes: which of several values is right, and which ranks differ.
progress.py   The activity of a rank: its current call, and whether it makes progress by itself.
sides.py      Where the ranks of a finding are, and what they do there.
standing_still.py  Diagnosis by stacks alone of ranks that stand still, in jobs not prepared.
setup/        Rules for setup.
collectives/  Rules for collectives, groups and split models: who diverged, which ranks wait.
training/     Rules for training that ends without an error and is wrong; which rank is slow.
source_code/  The user's code: what decides whether a line is reached, and its values.

To test a rule: `tests/traces.py` simulates a small job rank by rank, `tests/setup_cases.py` has
ranks in setup, and the functions below return the findings; no process is started.

The functions here load the rule table at the first diagnosis: it is a sixth of all code, and
`%load_ext` would otherwise wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from ddp_notebook.model import Case, Collectives, Diagnosis, RunFacts


def diagnose_run(case: Case, sources: Mapping[str, str] | None = None) -> Diagnosis:
    """Diagnose a run or, while no rank has issued a collective, its setup."""
    found: Diagnosis = _rules().diagnose_run(case, sources)
    return found


def diagnose_setup(case: Case) -> Diagnosis:
    """Diagnose a setup."""
    found: Diagnosis = _rules().diagnose_setup(case)
    return found


def diagnose_training(
    facts: Mapping[int, RunFacts],
    collectives: Collectives,
    sources: Mapping[str, str] | None = None,
) -> Diagnosis:
    """Diagnose the training of a run that ended without an error."""
    found: Diagnosis = _rules().diagnose_training(facts, collectives, sources)
    return found


def _rules() -> ModuleType:
    from ddp_notebook.diagnosis import diagnose

    return diagnose
