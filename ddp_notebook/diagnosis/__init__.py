"""What is wrong and whose mistake it is: findings from what all ranks report. Pure functions.

conditions.py The tests in the code that decide whether a line is reached, the nearest first.
context.py    What the rules look at: all ranks' reports, and what is derived from them once.
deaths.py     Ranks whose process ended: how, what is known of why, and how to get them back.
diagnose.py   The table of all rules, in order: what is wrong with a set-up, a run, or its training.
failures.py   What ranks failed with, or wait in, where no rule says more.
files.py      Rules about files: paths that ranks change under each other, a store's file.
majority.py   Which of several values is the right one, and which ranks have another.
names.py      What a test in the code is on each rank: the same on all, of its own, by its number.
pages.py      A page of help for each category: what torch prints, what it means, how it is mended.
progress.py   What a rank is doing: which call it is in, and whether it makes progress by itself.
setup/        Rules for set-up.
collectives/  Rules for collectives: who diverged from the others, and how.
parallel/     Rules for programs that part a model or its data over ranks.
against/      A run compared with the same run on one rank: where do they part?
training/     Rules for training that ends well and is wrong.
steps/        What the ranks' training steps tell, side by side: who is slow.

To test a rule: `tests/traces.py` plays a small job rank by rank, `tests/setup_cases.py` has ranks
in set-up, and the functions below say what is found; no process is started.

The functions here load the table when something is first diagnosed: it is a sixth of all code
that `%load_ext` would otherwise wait for.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddp_notebook.model import Case, Collectives, Diagnosis, RunFacts


def diagnose_run(case: Case, sources: Mapping[str, str] | None = None) -> Diagnosis:
    """What is wrong with a run or, while no rank has issued a collective, with its set-up."""
    from ddp_notebook.diagnosis import diagnose

    return diagnose.diagnose_run(case, sources)


def diagnose_setup(case: Case) -> Diagnosis:
    """What is wrong with a set-up."""
    from ddp_notebook.diagnosis import diagnose

    return diagnose.diagnose_setup(case)


def diagnose_training(
    facts: Mapping[int, RunFacts],
    collectives: Collectives,
    sources: Mapping[str, str] | None = None,
) -> Diagnosis:
    """What is wrong with the training of a run that ended well."""
    from ddp_notebook.diagnosis import diagnose

    return diagnose.diagnose_training(facts, collectives, sources)
