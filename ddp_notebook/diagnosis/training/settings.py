"""The rule for settings of a process that change what it computes, and that differ."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.majority import minority
from ddp_notebook.model import Category, Finding


def other_precision(context: Context) -> Iterator[Finding]:
    """Ranks that train one model compute with other settings."""
    for model in context.models.values():
        settings = {
            rank: (*context.facts[rank].precision, f"torch.autocast={each.autocast or 'off'}")
            for rank, each in model.of.items()
            if each.forwards
        }
        if len(settings) < 2 or len({len(each) for each in settings.values()}) != 1:
            continue
        for values in zip(*settings.values(), strict=True):
            of = dict(zip(settings, values, strict=True))
            if len(set(of.values())) > 1:
                yield _differs(of)
                return


def _differs(of: dict[int, str]) -> Finding:
    ranks = minority(of)
    name, _, value = of[ranks[0]].partition("=")
    return Finding(
        Category.NUMERICS_MISMATCH,
        ranks,
        f"{name} is {value}, and something else on other ranks: they compute with other precision",
        f"Make the same setting on every rank: {name}.",
        evidence=tuple(f"rank {rank}: {text}" for rank, text in of.items()),
    )
