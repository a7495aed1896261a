"""Why a run does not get on, or went wrong: the rules of set-up and of collectives together."""

from __future__ import annotations

from ddp_notebook.analysis import setup_rules
from ddp_notebook.model import Diagnosis, SetupCase


def diagnose_run(case: SetupCase) -> Diagnosis:
    """What is wrong with this run. Findings come in the order in which to mend them."""
    return setup_rules.diagnose(case)
