"""The way in to the rules, for those who may never need them."""

from __future__ import annotations

from collections.abc import Mapping

from ddp_notebook.model import Case, Diagnosis


def diagnose_run(case: Case, sources: Mapping[str, str] | None = None) -> Diagnosis:
    """What `run_rules.diagnose_run` says.

    The rules are loaded when something is asked of them for the first time: they are a sixth of
    what there is to load, and `%load_ext` is to return at once.
    """
    from ddp_notebook.diagnosis import run_rules

    return run_rules.diagnose_run(case, sources)
